"""What survives: stage, commit, verify, prune. Folders and manifests only; what the files hold is the caller's."""
