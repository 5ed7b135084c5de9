"""Container images: definitions, wheelhouse, base image, module layers, signatures, lock.

A chain's images share one base image (system, Python, torch); what differs between modules is a
small squashfs layer that is appended to a copy of it. ``build.build_images`` is the way in; only
``apptainer`` knows the container program.
"""
