/* In the place of the header of the CUDA toolkit. */
#pragma once

#include "numbers.h"
