"""Where the checkpoints of an experiment lie, and how many are kept."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from hpc_det.config.fields import AbsolutePath, NotNegative, OptionalText, Propagation, Text
from hpc_det.config.section import Section, kind_discriminator


class StorageKind(Section):
    kind_key = "type"

    type: str | None
    save_experiment_best: NotNegative = Field(
        default=0, description="So many checkpoints are kept that are the best of the experiment."
    )
    save_trial_best: NotNegative = Field(
        default=1, description="So many checkpoints are kept of each trial that are its best."
    )
    save_trial_latest: NotNegative = Field(
        default=1, description="So many checkpoints are kept of each trial that are its latest."
    )


class OwnFolder(StorageKind):
    type: None = Field(default=None, description="Without a type, checkpoints lie in the experiment's own folder.")


class SharedFs(StorageKind):
    type: Literal["shared_fs"] = Field(description="A folder of a file system that all nodes see.")
    host_path: AbsolutePath = Field(description="That folder.")
    storage_path: OptionalText = Field(
        default=None, description="A folder in host_path for the checkpoints: relative, or a path below host_path."
    )
    propagation: Propagation = Field(default="rprivate", description="How a container would mount it.")


class Directory(StorageKind):
    type: Literal["directory"] = Field(description="A folder as the ranks see it, in a container or not.")
    container_path: AbsolutePath = Field(
        description="That folder; in a container, of a folder that bind_mounts brings there."
    )


class S3(StorageKind):
    type: Literal["s3"] = Field(description="A bucket of Amazon S3, or of a server that speaks its protocol.")
    bucket: Text = Field(description="The bucket's name.")
    prefix: OptionalText = Field(default=None, description="What the names of all objects begin with.")
    endpoint_url: OptionalText = Field(default=None, description="The server, if it is not Amazon's.")
    access_key: OptionalText = Field(default=None, description="The key's id; by default as the AWS tools find it.")
    secret_key: OptionalText = Field(default=None, description="The key; hidden wherever the config is shown.")


class Gcs(StorageKind):
    type: Literal["gcs"] = Field(description="A bucket of Google Cloud Storage.")
    bucket: Text = Field(description="The bucket's name.")
    prefix: OptionalText = Field(default=None, description="What the names of all objects begin with.")


class Azure(StorageKind):
    type: Literal["azure"] = Field(description="A container of Azure Blob Storage.")
    container: Text = Field(description="The container's name.")
    connection_string: OptionalText = Field(
        default=None, description="How to reach the account; hidden wherever the config is shown."
    )
    account_url: OptionalText = Field(default=None, description="The account, instead of connection_string.")
    credential: OptionalText = Field(
        default=None, description="The secret for account_url; hidden wherever the config is shown."
    )


_which = kind_discriminator("", OwnFolder, SharedFs, Directory, S3, Gcs, Azure)
CheckpointStorage: TypeAlias = Annotated[
    Annotated[OwnFolder, Tag("<>")]
    | Annotated[SharedFs, Tag("<shared_fs>")]
    | Annotated[Directory, Tag("<directory>")]
    | Annotated[S3, Tag("<s3>")]
    | Annotated[Gcs, Tag("<gcs>")]
    | Annotated[Azure, Tag("<azure>")],
    Discriminator(_which),
]


def store_url(storage: StorageKind) -> str | None:
    """Where the checkpoints of all experiments are in an object store, as fsspec names it; None: in no store."""
    match storage:
        case S3():
            return _joined(f"s3://{storage.bucket}", storage.prefix)
        case Gcs():
            return _joined(f"gs://{storage.bucket}", storage.prefix)
        case Azure():
            return f"az://{storage.container}"
    return None


def _joined(url: str, prefix: str | None) -> str:
    return "/".join(part for part in (url, (prefix or "").strip("/")) if part)


def is_below(path: str, folder: str) -> bool:
    """Whether `path`, a relative one or not, lies in `folder`: by the names alone, no link is followed."""
    whole = PurePosixPath(folder) / path
    return ".." not in whole.parts and whole.is_relative_to(folder)
