"""Array types shared by the modules of this package."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
