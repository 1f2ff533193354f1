"""An installation of hpc_det that an entrypoint replaces by a newer one while its job runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import hpc_det

PACKAGE = Path(hpc_det.__file__).parent
AWAITS_IMPORTS = 'until [ "$(wc -l <"$INSTALLED/imported")" -ge $IMPORTERS ]; do sleep 0.02; done'
"""What an entrypoint does before it replaces hpc_det, so that it does not do so in the middle of the job's imports."""
REPLACES = f"""
[ "$HPC_DET_NUMBER" = 1 ] || exit 0
{AWAITS_IMPORTS}
mv "$INSTALLED/hpc_det" "$INSTALLED/former"
mv "$INSTALLED/newer" "$INSTALLED/hpc_det"
exit 1
"""
"""An entrypoint whose first attempt upgrades hpc_det and fails."""
MARKED = ("launch/job/worker.py", "launch/agent.py")


def install(folder: Path) -> None:
    """Copy hpc_det to `folder`, and beside it, as `newer`, one whose worker and agents write their names to `used`."""
    for name in ("hpc_det", "newer"):
        shutil.copytree(PACKAGE, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "imported").touch()
    with (folder / "hpc_det" / "launch" / "job" / "late_imports.py").open("a") as late:
        late.write(f"with open({str(folder / 'imported')!r}, 'a') as file:\n    print('done', file=file)\n")
    for name in MARKED:
        with (folder / "newer" / name).open("r+") as file:
            doc, future, rest = file.read().partition("from __future__ import annotations\n")
            mark = f"with open({str(folder / 'used')!r}, 'a') as used: print({name!r}, file=used)\n"
            file.seek(0)
            file.write(doc + future + mark + rest)
