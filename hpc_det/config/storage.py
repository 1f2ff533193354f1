"""The schema of `checkpoint_storage`: the location of checkpoints and their retention."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from hpc_det.config.fields import AbsolutePath, NotNegative, OptionalText, Prefix, Propagation, Text
from hpc_det.config.section import Section, kind_discriminator


class StorageKind(Section):
    kind_key = "type"

    type: str | None
    save_experiment_best: NotNegative = Field(
        default=0, description="Number of checkpoints to keep that are the best of the experiment."
    )
    save_trial_best: NotNegative = Field(
        default=1, description="Number of checkpoints to keep of each trial that are its best."
    )
    save_trial_latest: NotNegative = Field(
        default=1, description="Number of checkpoints to keep of each trial that are its latest."
    )


class OwnFolder(StorageKind):
    type: None = Field(default=None, description="Without a type, checkpoints are saved in the experiment's folder.")


class SharedFs(StorageKind):
    type: Literal["shared_fs"] = Field(description="A folder on a file system that all nodes share.")
    host_path: AbsolutePath = Field(description="Path of the folder.")
    storage_path: OptionalText = Field(
        default=None,
        description="Folder for the checkpoints, relative to host_path or an absolute path below it; null: host_path.",
    )
    propagation: Propagation = Field(
        default="rprivate", description="Propagation of the mount in a container, as in mount(8)."
    )
    container_path: OptionalText = Field(
        default=None,
        description="Path in a container in older versions of Determined. It has no effect: a container sees the "
        "folder at host_path.",
    )


class Directory(StorageKind):
    type: Literal["directory"] = Field(description="A folder, named by its path in the container if there is one.")
    container_path: AbsolutePath = Field(
        description="Path of the folder; in a container it must be inside a folder that bind_mounts mounts."
    )


class S3(StorageKind):
    type: Literal["s3"] = Field(description="A bucket of Amazon S3, or of a server with the same protocol.")
    bucket: Text = Field(description="Name of the bucket.")
    prefix: Prefix = Field(default=None, description="Prefix of the names of all objects.")
    endpoint_url: OptionalText = Field(default=None, description="URL of the server; null: Amazon's.")
    access_key: OptionalText = Field(
        default=None,
        description="ID of the access key, masked wherever the configuration is shown; null: found as by the AWS "
        "tools.",
    )
    secret_key: OptionalText = Field(
        default=None, description="Secret of the access key; masked wherever the configuration is shown."
    )


class Gcs(StorageKind):
    type: Literal["gcs"] = Field(description="A bucket of Google Cloud Storage.")
    bucket: Text = Field(description="Name of the bucket.")
    prefix: Prefix = Field(default=None, description="Prefix of the names of all objects.")


class Azure(StorageKind):
    type: Literal["azure"] = Field(description="A container of Azure Blob Storage.")
    container: Text = Field(description="Name of the container.")
    connection_string: OptionalText = Field(
        default=None, description="Connection string of the account; masked wherever the configuration is shown."
    )
    account_url: OptionalText = Field(
        default=None, description="URL of the account, as an alternative to connection_string."
    )
    credential: OptionalText = Field(
        default=None, description="Secret for account_url; masked wherever the configuration is shown."
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
    """Return fsspec's URL of the object store for the checkpoints of all experiments; None for other storage."""
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
    """Return whether `path`, absolute or relative to `folder`, is inside `folder`. Symbolic links are not resolved."""
    whole = PurePosixPath(folder) / path
    return ".." not in whole.parts and whole.is_relative_to(folder)
