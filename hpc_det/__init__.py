"""Determined's trials and RaySGD's drivers as gang jobs on the Slurm or PBS cluster that a site runs.

One flow, one folder a step:

    cli         the command line, hpc-det: what a user asks for and sees
    config      1. what was asked for: Hydra or YAML -> template merge -> valid Experiment and Cluster
    search         which trials to run
    plan        2. what will happen: JobPlan, frozen, JSON, no I/O
    submit      3. plan -> script -> job id: submitit as carrier
    schedulers     Slurm and the others: commands, what they answer, one table of states; a file each
    launch      4. once per node: the job, node agents, launchers, the way into a rank
    pytorch     5. once per rank: PyTorchTrial, DeepSpeedTrial, their contexts, data, the one loop
    core           what every rank needs: collectives, the agreement to stop, checkpoints, metrics
    checkpoint  6. what survives: stage, commit, verify, prune
    requeue     7. what happens next: causes and budgets -> decision
    throughput     what limits the throughput of a training: short runs of it, and what they show
    resume_check   whether a trial resumes exactly: two short trainings compared, and the cause of a difference
    view           what the files of an experiment say, for every reader
    report         an experiment as one HTML page, and the facts that it shows
    top            all experiments and their jobs on one screen, live
    doctor         what of all this a site supports, and a remedy for what it lacks
    sgd            RaySGD's TorchTrainer: a driver, and a gang that outlives its ranks and its nodes; searches, fit
    sweep          anyone's Hydra app: launchers for its sweeps, and what runs it on a node
    notify         who is told of the beginning and the end of an experiment
    node           what processes on the nodes share: signals, network, rendezvous, one authenticated line
    store          the run folder: every file name, the journal, the stop request
    compat         other names for hpc_det: `import determined`, for code that was written for Determined
    errors         what a user sees when something is wrong
    process        processes as Linux shows them
    resources      where conf/, slurm_templates/ and docs/examples/ lie
"""
