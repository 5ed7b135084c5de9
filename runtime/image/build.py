"""Building a chain's images: the base once, each module as a layer on a copy of it.

``plan`` decides what is built and why; the result is written to ``dni.lock``.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from dni_runtime import __version__
from dni_runtime.errors import BuildError, DataError, UnavailableError
from dni_runtime.files import is_full
from dni_runtime.image import apptainer, layers, sif
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.image.base import BasePlan, BuildOptions, build_base, plan_base
from dni_runtime.image.layers import ModuleBuild
from dni_runtime.image.lock import ImageLock, LockedImage, read_lock, write_lock
from dni_runtime.image.plan import ModulePlan, lock_to_keep, plan_modules
from dni_runtime.image.progress import Reporter, Step, silent
from dni_runtime.image.scratch import scratch_folder
from dni_runtime.image.wheels import sha256_file
from dni_runtime.spec import ImageSpec


@dataclass(frozen=True, slots=True)
class BuildResult:
    lock: ImageLock
    path: Path  # of the lock
    built: tuple[str, ...]  # modules whose images were built or signed


def build_images(
    modules: Sequence[ModuleBuild],
    image: ImageSpec,
    options: BuildOptions,
    *,
    tool: Apptainer,
    report: Reporter = silent,
) -> BuildResult:
    """Build those of a chain's images that are missing or outdated.

    If one fails, those built before it stay, and are in the lock. ``report`` may be called from
    several threads.
    """
    if os.geteuid() == 0:
        raise UnavailableError(
            "images are not built as root: Apptainer builds them in a user namespace",
            hint="run this as an ordinary user",
        )
    if options.key is not None and not options.key.is_file():
        raise DataError(
            f"--key: {options.key} is not a file", hint="give a private key in PEM form"
        )
    try:
        return _build(modules, image, options, tool, report)
    except OSError as error:  # a full disk, or a read-only folder
        raise BuildError(
            f"{error.filename or options.out}: {error.strerror or error}",
            hint=apptainer.room_hint(options.out)
            if is_full(error)
            else f"check write permission in {options.out} and {options.cache} (XDG_CACHE_HOME)",
        ) from error


def _build(
    modules: Sequence[ModuleBuild],
    image: ImageSpec,
    options: BuildOptions,
    tool: Apptainer,
    report: Reporter,
) -> BuildResult:
    old = read_lock(options.out)
    keep = lock_to_keep(old, options)
    options.out.mkdir(parents=True, exist_ok=True)
    plan = plan_modules(modules, plan_base(image, options, lock=keep), old, options)
    base: BasePlan | None = None
    locked_base = None if old is None else old.base
    if locked_base is None or any(p.reason for p in plan):
        base, locked_base = build_base(tool, image, options, report, keep)
        plan = plan_modules(modules, base, old, options)

    lock = ImageLock(
        chain=modules[0].worker.chain,
        builder=str(tool),
        runtime_version=__version__,
        base=locked_base,
        modules={p.module.name: p.locked for p in plan if p.locked and not p.reason},
    )
    alone = options.full or (options.sign and _can_ask())
    workers = 1 if alone else min(4, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(_make, tool, p, base, options, report) for p in plan]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            ended = [(p, job) for p, job in zip(plan, jobs, strict=True) if not job.cancelled()]
            made = {p.module.name: job.result() for p, job in ended if job.exception() is None}
            locked = lock.modules | made
            order = {m.name: locked[m.name] for m in modules if m.name in locked}
            lock = lock.model_copy(update={"modules": order})
            path = write_lock(options.out, lock)
    for _, job in ended:
        job.result()
    built = [p.module.name for p in plan if made[p.module.name] is not p.locked]
    return BuildResult(lock, path, tuple(built))


def _make(
    tool: Apptainer,
    plan: ModulePlan,
    base: BasePlan | None,
    options: BuildOptions,
    report: Reporter,
) -> LockedImage:
    """Build one module's image, or only sign it, or keep it."""
    name = plan.module.name
    final = options.out / f"{name}.sif"
    if plan.reason is None and plan.locked is not None:
        if not plan.sign:
            report(Step(name, "same", final.name))
            return plan.locked
        report(Step(name, "start", "signing"))
    else:
        report(Step(name, "start", f"{options.method}: {plan.reason}"))
    with scratch_folder(options.out, f".{name}-") as scratch:
        image = scratch / final.name
        if plan.reason is None:
            sif.copy_image(final, image)
        else:
            assert base is not None
            assert base.image is not None
            layers.write_layer(plan.files, scratch / "layer")
            if plan.definition is not None:
                (scratch / "base.sif").symlink_to(base.image)
                (scratch / "module.def").write_text(plan.definition, encoding="utf-8")
                apptainer.stream(
                    apptainer.build_argv(tool, image.name, "module.def", test=options.test),
                    what=f"building the image of module {name!r}",
                    on_line=lambda line: report(Step(name, "line", line)),
                    cwd=scratch,
                    log=options.out / f"{name}.log",
                )
            else:
                layers.pack_layer(scratch / "layer", scratch / "layer.sqfs")
                sif.copy_image(base.image, image)
                sif.append_layer(tool, image, scratch / "layer.sqfs")
                sif.relabel(tool, image, plan.module.labels, plan.module.help, scratch=scratch)
        if plan.sign:
            sign(tool, image, key=options.key)
        image.chmod(0o644)
        state, sha256 = image.stat(), sha256_file(image)
        image.replace(final)
    assert plan.content is not None
    report(Step(name, "done", f"{final.name}, {state.st_size / 1e6:.0f} MB"))
    return LockedImage(
        image=final.name,
        sha256=sha256,
        size_bytes=state.st_size,
        mtime_ns=state.st_mtime_ns,
        content=plan.content,
        module_hash=plan.module.hash,
        sources=layers.source_digests(plan.files),
        method=options.method,
        definition_sha256=(
            hashlib.sha256(plan.definition.encode()).hexdigest() if plan.definition else None
        ),
        signed=options.signature,
        signer=options.signer,
    )


def _can_ask() -> bool:
    """Return whether a terminal can ask for a passphrase."""
    return sys.stdin is not None and sys.stdin.isatty()


def sign(tool: Apptainer, image: Path, *, key: Path | None = None) -> None:
    """Sign an image in place.

    On a terminal the program may ask for the key's passphrase; it writes to stderr, since stdout is
    for results.
    """
    argv = apptainer.sign_argv(tool, image, key=key)
    hint = (
        f"make a key pair with: {tool.path} key newpair"
        if key is None
        else f"is {key} a private key in PEM form?"
    )
    if _can_ask():
        if subprocess.run(argv, stdout=sys.stderr.fileno(), check=False).returncode != 0:
            raise BuildError(f"signing {image.name} failed", hint=hint)
        return
    try:
        apptainer.capture(argv, what=f"signing {image.name}")
    except BuildError as error:
        raise BuildError(error.message, tail=error.tail, hint=hint) from error
