"""Whether a served model survives use, misuse and faults: `run` (load), `fuzz` (HTTP API), `faults`. See the README."""
