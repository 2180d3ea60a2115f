// The part of the native core that a step uses beside its passes (state.cpp).

#pragma once

#include <Python.h>

// Adds its functions to the extension; false if a Python error is set.
bool add_state_functions(PyObject* module);
