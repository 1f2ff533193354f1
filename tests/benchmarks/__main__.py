"""Run every benchmark in turn, or only the named ones: `python -m tests.benchmarks loop memory`."""

from __future__ import annotations

import sys

from tests.benchmarks import (
    checkpoint,
    command_line,
    core,
    create,
    deepspeed_overhead,
    deepspeed_save,
    demo,
    ettr,
    gang_overhead,
    gpu,
    imports,
    journal,
    long_metrics,
    loop_memory,
    loop_overhead,
    many,
    many_ranks,
    notice_to_checkpoint,
    optimizations,
    profiling,
    rank_memory,
    rendezvous,
    report,
    restart,
    sampler_start,
    scale,
    search,
    search_slurm,
    sgd,
    start,
    sweep,
)

BENCHMARKS = {
    "checkpoint": checkpoint.main,
    "commands": command_line.main,
    "core": core.main,
    "create": create.main,
    "many": many.main,
    "many_ranks": many_ranks.main,
    "preemption": notice_to_checkpoint.main,
    "loop": loop_overhead.main,
    "profiling": profiling.main,
    "gang": gang_overhead.main,
    "demo": demo.main,
    "deepspeed": deepspeed_overhead.main,
    "deepspeed_save": deepspeed_save.main,
    "optimizations": optimizations.main,
    "memory": loop_memory.main,
    "rank_memory": rank_memory.main,
    "sampler": sampler_start.main,
    "search": search.main,
    "search_slurm": search_slurm.main,
    "sgd": sgd.main,
    "start": start.main,
    "restart": restart.main,
    "journal": journal.main,
    "long_metrics": long_metrics.main,
    "sweep": sweep.main,
    "gpu": gpu.main,
    "imports": imports.main,
    "rendezvous": rendezvous.main,
    "scale": scale.main,
    "ettr": ettr.main,
    "report": report.main,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or BENCHMARKS:
        BENCHMARKS[name]()
