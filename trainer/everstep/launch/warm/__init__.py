"""The warm pool: ranks forked from an interpreter that holds torch already, behind a shim.

Three kinds of process besides the launcher: the *nursery* (`nursery.py`), an interpreter started
exactly as a rank would be and stopped just before its script, that forks ranks on request; the
*shim* (`shim.py`), torchrun's child, that stands in for a rank; and the ranks. The launcher's
`Pool` (`pool.py`) is the only one that decides.
"""
