"""Run Determined's trials and RaySGD's drivers as gang jobs on a Slurm or PBS cluster.

A folder may import only the folders listed below it (tests/test_architecture.py checks the order):

    cli            the command line, hpc-det: one module per command; cli/top is the live screen
    compat         `import determined` and `import ray` for code that was written for Determined or RaySGD
    client         the same operations from Python: create, wait, metrics, checkpoints
    report         an experiment as one HTML page, and the data that the page shows
    doctor         checks of what a site supports, each with a remedy
    sweep          Hydra launchers for any Hydra app, and the program that runs such an app on a node
    sgd            RaySGD's TorchTrainer: driver, elastic gang, operators, tune
    submit         plan -> script -> job id: renders slurm_templates/, submitit executors
    launch         on the nodes: the job, one agent per node, launchers, the entry point of a rank
    notify         hooks called when an experiment starts, pauses or ends
    view           reads the files of experiments: states, histories, metrics, profiles
    integrations   adapters for W&B, MLflow and other packages; each is imported only where it is used
    pytorch        PyTorchTrial, DeepSpeedTrial: trial/ loop/ data/ strategies/ state/ deepspeed/ profiling/ inference/
    core           the public Core API, for any training loop: run, report, save, resume, stop, search
    checkpoint     from tensors in memory to a committed folder and back: copies, writer, commit, verify, prune, mirror
    distributed    inside a rank: its process, collectives, the agreement to stop, metrics, RNG states
    schedulers     slurm/ pbs/ local: commands, parsers, flags, queue, detection of a site, processes on its nodes
    plan           configuration + cluster -> JobPlan: effective config, multirun points, pools, containers
    search         searchers over a journal
    config         layers, template merge, validation, secrets; independent of any cluster
    store          facts on disk: file names, journals, metrics, failures, stop requests
    node           standard library only: processes, signals, files, the line protocol, network, rendezvous
    requeue        why an attempt ended -> whether the trial runs again
    errors         exceptions with messages for users, and the helpers that word them
    resources      where conf/, slurm_templates/ and docs/examples/ are installed
"""
