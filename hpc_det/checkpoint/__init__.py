"""Checkpoints, from tensors in memory to a committed folder and back.

checkpoints                      saving and loading on all ranks together
async_save                       one save: what each rank does for it while training continues
pinned_staging, torch_layout     copies of tensors in memory, and where torch.save puts them in a file
content                          what a file may contain, so that loading it runs no code
staging, snapshots               writing a checkpoint, and a snapshot of a TorchTrainer
committed, verified, damaged     checkpoints on disk: the newest good one, and what becomes of the others
committed_folder                 the commit and the manifest of both
sealed_files, reading, seals     files of both, written, read and checked
storage, object_store, retention where checkpoints lie, and how many are kept
save_schedule                    when to save
"""
