"""How much code oneDNN keeps that it has compiled for the shapes of matrix products, in engines and in training."""

import os

# oneDNN keeps the code of 1024 products by default, which is half a gigabyte. Numbers of rows differ from step to step,
# so a process would grow for hours; a pass over a model needs a few dozen at a time. Compiling takes about 1 ms.
PRODUCTS_KEPT = 128


def bound_compiled_products() -> None:
    """Bound what oneDNN keeps in this process, unless the environment says how much.

    To be called before oneDNN is first used, because it reads the bound then.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PRODUCTS_KEPT))
