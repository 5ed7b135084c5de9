"""Container images: definitions, wheelhouse, base image, module layers, signatures, lock.

A chain's images share one base image (system, Python, torch); modules differ only in a small
squashfs layer that is appended to a copy of it. ``build.build_images`` is the entry point; only
``apptainer`` depends on the container program.
"""
