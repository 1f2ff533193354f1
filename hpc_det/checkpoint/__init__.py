"""Checkpoints, from tensors in memory to a committed folder and back.

checkpoints                      saving and loading, as collective calls of all ranks
async_save                       one save: the part of each rank, in the training thread or in the background
pinned_staging, torch_layout     copies of tensors in memory, and the layout of a file of torch.save
content                          the allowed content of files, so that loading them runs no code
staging, snapshots               writing a checkpoint, and a snapshot of a TorchTrainer
committed, verified, damaged     checkpoints on disk: the manifest, the newest undamaged one, those set aside as damaged
node_folders, rank_files         the files of ranks in a gang of several nodes: where they are, and loading them
committed_folder                 commit and manifest of checkpoints and snapshots
sealed_files, reading, seals     writing, reading and verifying their files
metadata                         what a checkpoint says about itself, and what users add to it
storage, object_store, retention the places of checkpoints, and which ones are kept
save_schedule                    when to save
"""
