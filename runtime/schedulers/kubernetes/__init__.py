"""Kubernetes: objects for a cluster, as data; nothing here talks to one.

``objects`` has what pods of all kinds have, ``training`` a Job for each module, ``service`` a
StatefulSet for each and the front of a trained chain. ``scheduler`` is the place among the others.
"""
