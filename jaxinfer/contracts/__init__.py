"""What every kernel, layer and state change promises, and the checks that hold them to it.

`contract` has the form of a promise and `kernels` one file an operation; `registry` knows them all.
From a contract follow, without further code, `checks` against the reference, the compilation in
`h200`, the timing in `bench`, the choice of block sizes in `tune` and its `page`.
"""
