"""Provenance as one JSON document: collected in a process, published with a schema, and compared with another's.

`schema` says what is in it, `collect` makes it, `secrets` keeps keys out of it, `diff` tells two apart.
"""
