"""The chain's data: which samples a batch has, and who reads their labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from dni_runtime.spec.named import Choice, Frozen

REPLICA = "{replica}"
"""In ``data.path``: the number of the head's replica, each of which has data of its own."""


def own_path(path: str | Path, replica: int) -> Path:
    """Return the path of the data that one replica of the head reads."""
    return Path(str(path).replace(REPLICA, str(replica)))


class LabelsSpec(Frozen):
    """The labels, if the tail reads them itself.

    Attributes:
        dataset: The data set of labels alone; None: the tail reads the head's data set, too.
        path: Folder or file of that data set.
        args: Its options.
    """

    dataset: str | None = None
    path: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)


class DataSpec(Frozen):
    """The data that the head reads.

    Attributes:
        dataset: ``digits``, ``mnist``, ``fashion-mnist``, ``cifar10``, ``npz``, ``text``, or the
            import path (``package.module:Class``) of a ``torch.utils.data.Dataset``.
        path: Folder or file of the data; not needed if a system package installs it. With
            ``{replica}`` in it each replica of the head has data of its own.
        batch_size: Samples per training batch.
        eval_batch_size: Samples per evaluation batch (default: four training batches).
        flatten: Pass samples as vectors.
        normalize: Scale images to zero mean and unit variance of the training set.
        shuffle: Draw a new order of the samples each epoch, from the chain's seed.
        streams: Instead split the samples into ``batch_size`` contiguous streams, one for each row
            of the batches, so that each row continues from batch to batch.
        drop_last: Leave out a last, smaller batch.
        train_limit: Maximum number of training samples.
        eval_limit: Maximum number of evaluation samples.
        validation: Number or share of the last training samples to hold out: evaluations during
            training use these, and the data set's own evaluation samples become the test set,
            evaluated once, at the end of the run.
        augment: Import paths of classes, with keyword arguments; their objects are called in this
            order with each batch of training samples.
        workers: Processes that load and augment training batches in parallel to training; 0: a
            thread loads them if loading is slow, and the main thread augments them.
        args: Options of the data set. A user's class gets them as keyword arguments and is
            instantiated twice: with ``train=True`` and with ``train=False``.
        labels: The labels, if they stay at the tail: written as ``tail``, or as their own data set;
            None: the head sends them.
    """

    dataset: str = "digits"
    path: str | None = None
    batch_size: Annotated[int, Field(ge=1, le=1 << 20)] = 128
    eval_batch_size: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    flatten: bool = False
    normalize: bool = True
    shuffle: bool = True
    streams: bool = False
    drop_last: bool = False
    train_limit: Annotated[int, Field(ge=1)] | None = None
    eval_limit: Annotated[int, Field(ge=1)] | None = None
    validation: int | float | None = None
    augment: tuple[Choice, ...] = ()
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    args: dict[str, Any] = Field(default_factory=dict)
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
        own: dict[str, Any] = {"flatten": False, "augment": (), "workers": 0}
        if self.labels is not None and self.labels.dataset is not None:
            own |= self.labels.model_dump()
            own["labels"] = LabelsSpec(dataset=self.labels.dataset)
        return self.model_copy(update=own)

    def at(self, path: object | None) -> Self:
        """Return the same data at another path; None keeps the path."""
        return self if path is None else self.model_copy(update={"path": str(path)})

    @property
    def own(self) -> bool:
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
            return max(int(samples * self.validation), 1)
        return self.validation or 0

    @property
    def largest_batch(self) -> int:
        """Samples in the largest batch that can be sent."""
        return max(self.batch_size, self.eval_size)

    @property
    def eval_size(self) -> int:
        """Samples per evaluation batch."""
        return self.eval_batch_size or 4 * self.batch_size
