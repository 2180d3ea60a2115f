// What a step asks of a model's modules and parameters before and after its passes, in one call
// each: there are some hundred of them, none in a cache by then, and for each of them Python reads
// several objects of its own.
//
// Python is the reference here, too: what is not usual is answered with None, and asked there.

#include "state.h"

#include <torch/csrc/autograd/python_variable.h>

namespace {

PyObject* parameter_type = nullptr;  // torch.nn.Parameter

PyObject* boolean(bool value) { return Py_NewRef(value ? Py_True : Py_False); }

// `have_no_gradient` in _torch.py.
PyObject* have_no_gradient(PyObject*, PyObject* tensors) {
  if (!PyList_CheckExact(tensors)) Py_RETURN_NONE;
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(tensors); ++at) {
    PyObject* object = PyList_GET_ITEM(tensors, at);
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if (type != parameter_type && type != THPVariableClass) Py_RETURN_NONE;
    if (THPVariable_Unpack(object).grad().defined()) return boolean(false);
  }
  return boolean(true);
}

// Compares the values of a registry with what was there before, from a position on; gives the next
// position, -1 if they differ, -2 if that cannot be told.
Py_ssize_t compare(PyObject* registry, PyObject* before, Py_ssize_t at) {
  if (registry == nullptr || !PyDict_Check(registry)) return -2;
  Py_ssize_t place = 0;
  PyObject* value = nullptr;
  while (PyDict_Next(registry, &place, nullptr, &value)) {
    if (at >= PyList_GET_SIZE(before) || PyList_GET_ITEM(before, at) != value) return -1;
    ++at;
  }
  return at;
}

// Whether `_held_by(modules)` of model_tree.py is what it was.
PyObject* hold_the_same(PyObject*, PyObject* const* given, Py_ssize_t count) {
  static PyObject* const names[] = {PyUnicode_InternFromString("_modules"),
                                    PyUnicode_InternFromString("_parameters")};
  if (count != 2 || !PyList_CheckExact(given[0]) || !PyList_CheckExact(given[1])) Py_RETURN_NONE;
  Py_ssize_t at = 0;
  for (Py_ssize_t which = 0; which < PyList_GET_SIZE(given[0]); ++which) {
    PyObject* attributes = PyList_GET_ITEM(given[0], which);
    if (!PyDict_CheckExact(attributes)) Py_RETURN_NONE;
    for (PyObject* name : names) {
      at = compare(PyDict_GetItemWithError(attributes, name), given[1], at);
      if (at == -1) return boolean(false);
      if (at < 0) {
        PyErr_Clear();
        Py_RETURN_NONE;
      }
    }
  }
  return boolean(at == PyList_GET_SIZE(given[1]));
}

// The values in some dicts whose names are not among `own`, and whose types not among `without`:
// `_values_beside` in held_state.py.
PyObject* values_beside(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 3 || !PyList_CheckExact(given[0]) || !PyFrozenSet_CheckExact(given[1]) ||
      !PySet_Check(given[2])) {
    Py_RETURN_NONE;
  }
  const Py_ssize_t least = PySet_GET_SIZE(given[1]);
  PyObject* found = PyList_New(0);
  if (found == nullptr) return nullptr;
  for (Py_ssize_t which = 0; which < PyList_GET_SIZE(given[0]); ++which) {
    PyObject* names = PyList_GET_ITEM(given[0], which);
    if (!PyDict_CheckExact(names) || PyDict_GET_SIZE(names) <= least) continue;
    Py_ssize_t place = 0;
    PyObject *name = nullptr, *value = nullptr;
    while (PyDict_Next(names, &place, &name, &value)) {
      const int is_own = PySet_Contains(given[1], name);
      const int is_without =
          is_own ? 1 : PySet_Contains(given[2], reinterpret_cast<PyObject*>(Py_TYPE(value)));
      if (is_own < 0 || is_without < 0 || (!is_without && PyList_Append(found, value) < 0)) {
        Py_DECREF(found);
        return nullptr;
      }
    }
  }
  return found;
}

PyMethodDef functions[] = {
    {"have_no_gradient", &have_no_gradient, METH_O, "Whether no tensor has a gradient."},
    {"hold_the_same", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&hold_the_same)),
     METH_FASTCALL, "Whether modules have the children and parameters they had."},
    {"values_beside", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&values_beside)),
     METH_FASTCALL, "Values of other names and types than some."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_state_functions(PyObject* module) {
  PyObject* nn = PyImport_ImportModule("torch.nn");
  if (nn == nullptr) return false;
  parameter_type = PyObject_GetAttrString(nn, "Parameter");  // for ever
  Py_DECREF(nn);
  return parameter_type != nullptr && PyModule_AddFunctions(module, functions) == 0;
}
