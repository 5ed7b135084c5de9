"""The chain's data: which samples a batch has, and who reads their labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from dni_runtime.spec.named import Choice, Frozen, Words

REPLICA = "{replica}"
"""In ``data.path``: the number of the head's replica, each of which has data of its own."""

PATH = "{path}"
"""In keywords of a user's data set: the absolute ``data.path``, where the worker runs."""


def own_path(path: str | Path, replica: int) -> Path:
    """Return the path of the data that one replica of the head reads."""
    return Path(str(path).replace(REPLICA, str(replica)))


_USERS = ("train", "evaluation", "collate", "max_length", "inputs", "label")
"""Settings of data sets that are a user's class or function."""


class LabelsSpec(Frozen):
    """The labels, if the tail reads them itself."""

    dataset: str | None = None  # of labels alone; None: the tail reads the head's data set, too
    path: str | None = None  # folder or file of that data set
    args: dict[str, Any] = Field(default_factory=dict)


class DataSpec(Frozen):
    """The data that the head reads."""

    # A name of ``DATASETS`` (``data/__init__.py``), or the import path of a torch Dataset.
    dataset: str = "digits"
    # Not needed if a system package installs the data. With ``{replica}`` in it each replica of the
    # head has data of its own.
    path: str | None = None
    batch_size: Annotated[int, Field(ge=1, le=1 << 20)] = 128
    # None: four training batches.
    eval_batch_size: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    flatten: bool = False  # pass samples as vectors
    normalize: bool = True  # images to zero mean and unit variance of the training set
    shuffle: bool = True  # a new order each epoch, from the chain's seed
    # Instead split the samples into ``batch_size`` contiguous streams, one for each row of the
    # batches, so that each row continues from batch to batch.
    streams: bool = False
    drop_last: bool = False  # leave out a last, smaller batch
    train_limit: Annotated[int, Field(ge=1)] | None = None  # most training samples
    eval_limit: Annotated[int, Field(ge=1)] | None = None  # most evaluation samples
    # Number or share of the last training samples to hold out for evaluations during training; the
    # data set's own evaluation samples are then the test set, evaluated once, at the end.
    validation: int | float | None = None
    # Classes, whose objects are called in this order with each batch of training samples.
    augment: tuple[Choice, ...] = ()
    # Processes that load and augment training batches in parallel to training; 0: a thread loads
    # them if loading is slow, and the main thread augments them.
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    # Options; a user's class or function gets them as keywords. It is called twice: with ``train``
    # true and false, or also with the keywords of ``train`` and of ``evaluation``.
    args: dict[str, Any] = Field(default_factory=dict)
    train: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    # A user's function that makes a batch of a list of rows; None: torch's ``default_collate``.
    collate: Choice | None = None
    # Largest length of a batch, the first dimension of its samples, if each batch has its own as
    # ``collate`` pads it; None: all have one length.
    max_length: Annotated[int, Field(ge=2, le=1 << 24)] | None = None
    # Keys of rows that are dicts: the inputs, in the order of ``forward``'s arguments, and the
    # label, or several. Empty: found by their names.
    inputs: Words = ()
    label: Words = ()
    # Written as ``tail``, or as a data set, if they stay at the tail; None: the head sends them.
    labels: LabelsSpec | None = None

    @field_validator("labels", mode="before")
    @classmethod
    def _at_the_tail(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value not in ("head", "tail"):
                raise ValueError(f"{value!r} is not allowed here: labels are at 'head' or 'tail'")
            return {} if value == "tail" else None
        return value

    @model_validator(mode="before")
    @classmethod
    def _labels_are_a_data_set(cls, value: Any) -> Any:
        labels = value.get("labels") if isinstance(value, dict) else None
        if isinstance(labels, dict) and (labels.get("path") or labels.get("args")):
            same = value.get("dataset", cls.model_fields["dataset"].default)
            return {**value, "labels": {**labels, "dataset": labels.get("dataset") or same}}
        return value

    @model_validator(mode="before")
    @classmethod
    def _streams_are_in_order(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("streams") is True:
            return {"shuffle": False, **value}
        return value

    @field_validator("validation", mode="before")
    @classmethod
    def _number_or_share(cls, value: object) -> object:
        number = type(value) is int and value >= 1
        share = type(value) is float and 0 < value < 1
        if value is not None and not number and not share:
            raise ValueError(f"{value!r} is neither a number of samples nor a share below 1")
        return value

    @model_validator(mode="after")
    def _of_a_users_data_set(self) -> Self:
        held_out = self.validation is not None and self.train is not None
        if (self.train is None) != (self.evaluation is None) and not held_out:
            there, missing = (
                ("evaluation", "train") if self.train is None else ("train", "evaluation")
            )
            more = ", or 'validation'" if missing == "evaluation" else ""
            raise ValueError(f"{there!r} needs {missing!r}: keywords for the other samples{more}")
        for name in _USERS if ":" not in self.dataset else ():
            if getattr(self, name) != type(self).model_fields[name].get_default():
                raise ValueError(
                    f"{name!r} is for a data set of your own, 'dataset: package.module:Class'"
                )
        return self

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.max_length is not None and (self.flatten or self.augment):
            name = "flatten" if self.flatten else "augment"
            raise ValueError(f"'max_length' excludes {name!r}, which needs samples of one shape")
        return self

    @model_validator(mode="after")
    def _one_order(self) -> Self:
        if self.streams and self.shuffle:
            raise ValueError(
                "'streams: true' excludes 'shuffle: true': streams keep the data's order"
            )
        return self

    @property
    def splits(self) -> bool:
        """Whether samples and labels are data sets of their own."""
        return self.labels is not None and self.labels.dataset is not None

    @property
    def labels_path(self) -> Path | None:
        """Folder or file of labels that are a data set of their own."""
        path = None if self.labels is None else self.labels.path
        return None if path is None else Path(path)

    @property
    def of_head(self) -> Self:
        """What the head needs to know."""
        if self.labels is None:
            return self
        named = LabelsSpec(dataset=self.labels.dataset)
        return self.model_copy(update={"labels": named})

    @property
    def of_labels(self) -> Self:
        """The same batches as the tail reads them, for their labels."""
        changes: dict[str, Any] = {"flatten": False, "augment": (), "workers": 0}
        if self.labels is not None and self.labels.dataset is not None:
            changes |= self.labels.model_dump()
            changes |= dict.fromkeys(("train", "evaluation", "collate", "max_length"))
            changes |= {"inputs": (), "label": ()}
            changes["labels"] = LabelsSpec(dataset=self.labels.dataset)
        return self.model_copy(update=changes)

    def at(self, path: object | None) -> Self:
        """Return the same data at another path; None keeps the path."""
        return self if path is None else self.model_copy(update={"path": str(path)})

    @property
    def per_replica(self) -> bool:
        """Whether each replica of the head has data of its own."""
        return REPLICA in (self.path or "")

    def of_replica(self, replica: int) -> Self:
        """Return the data that one replica of the head reads."""
        return self if self.path is None else self.at(own_path(self.path, replica))

    def train_batches(self, samples: int) -> int:
        """Return the number of batches in one epoch of ``samples`` samples.

        A last batch of a single sample is left out, because BatchNorm cannot normalise over one
        value per channel (``torch.nn.BatchNorm1d`` raises); with ``batch_size: 1`` none is. All
        streams have one length.
        """
        whole, rest = divmod(samples, self.batch_size)
        return whole + (rest > 1 and not self.drop_last and not self.streams)

    def held_out(self, samples: int) -> int:
        """Return how many of ``samples`` training samples are held out for validation."""
        if isinstance(self.validation, float):
            return max(int(round(samples * self.validation, 6)), 1)  # 0.29 of 100 are 29
        return self.validation or 0

    @property
    def largest_batch(self) -> int:
        """Samples in the largest batch that can be sent."""
        return max(self.batch_size, self.eval_size)

    @property
    def eval_size(self) -> int:
        """Samples per evaluation batch."""
        return self.eval_batch_size or 4 * self.batch_size
