"""How the GPUs of this host reach each other, and which NCCL settings suit that: `topology` and `profile`."""
