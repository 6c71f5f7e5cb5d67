"""How many tokens to draft, and when not to: a plan from measured cycle times and measured acceptance."""
