"""Run all benchmarks of TorchTrainer on CPUs, within ten minutes."""

from __future__ import annotations

from tests.benchmarks import sgd_calls, sgd_kill, sgd_loop, sgd_snapshots, sgd_steps


def main() -> None:
    for benchmark in (sgd_loop, sgd_steps, sgd_calls, sgd_kill, sgd_snapshots):
        benchmark.main()


if __name__ == "__main__":
    main()
