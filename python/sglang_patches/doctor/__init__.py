"""`sglang-patches doctor`: what of this host will slow a server down or keep it from starting, before it starts."""
