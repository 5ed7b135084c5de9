"""Releases: trained chains as named versions, in a store of one's own and in OCI registries.

``make`` turns a run into a release, ``store`` keeps releases and unpacks them, ``images`` puts
their images together, ``registry`` moves them, ``signature`` says who made one.
"""
