"""What kernels that split the cached context have in common; of no single patch.

`kernels`: how long a chunk is, and the merge. `plan`: splits, workspace, launch. `gate`: what any of them needs.
`check`: attention in float32, to try them against at start, which is `start`. `telling`: what ``/server_info`` says,
and the way back to upstream. `settings`: environment variables.
"""
