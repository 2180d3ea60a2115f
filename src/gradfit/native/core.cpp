// The native core: what `Recorder._observe` and `Recorder._record` (tape/recorder.py) do for the
// operations that nearly all are, without a line of Python.
//
// Python is the reference. This makes the very same objects, in the same dictionaries and lists, as
// the Python code does, and owns none itself: whatever is not usual (writes, random operations,
// subclasses of Tensor, dispatch modes, backward passes, nested listeners) is handed to the Python
// functions, with the same arguments. Each function here names the one that it is.
//
// The GIL is held wherever a Python object is touched, and not while a kernel runs.

#include "state.h"

#include <Python.h>
#include <structmember.h>

#include <ATen/MapAllocator.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/tensor_memoryformats.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using c10::IValue;
using torch::jit::Stack;

// ------------------------------------------------------------------------------ Python's objects

// Owns one reference.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* stolen) : object_(stolen) {}
  Ref(Ref&& other) noexcept : object_(other.release()) {}
  Ref& operator=(Ref&& other) noexcept {
    PyObject* old = object_;
    object_ = other.release();
    Py_XDECREF(old);
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  static Ref borrow(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  PyObject* get() const { return object_; }
  PyObject* release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// A Python error is set: it becomes torch's exception for one, which carries it to whoever called.
[[noreturn]] void raise() {
  python_error error;
  error.persist();
  throw std::move(error);
}

// Takes over what a function of CPython's has returned.
Ref owned(PyObject* object) {
  if (object == nullptr) raise();
  return Ref(object);
}

void check(int status) {
  if (status < 0) raise();
}

template <typename... Arguments>
Ref call(PyObject* function, Arguments... arguments) {
  PyObject* stack[] = {arguments...};
  return owned(PyObject_Vectorcall(function, stack, sizeof...(arguments), nullptr));
}

template <typename... Arguments>
Ref call_method(PyObject* object, PyObject* name, Arguments... arguments) {
  PyObject* stack[] = {object, arguments...};
  return owned(PyObject_VectorcallMethod(name, stack, 1 + sizeof...(arguments), nullptr));
}

// A name in `__slots__`: where in an object it lies.
struct Slot {
  Py_ssize_t offset = 0;
  PyObject*& in(PyObject* object) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
  }
  void set(PyObject* object, Ref content) const {
    PyObject* old = in(object);
    in(object) = content.release();
    Py_XDECREF(old);
  }
};

Slot slot_of(PyObject* type, const char* name) {
  Ref descriptor = owned(PyObject_GetAttrString(type, name));
  if (Py_TYPE(descriptor.get()) != &PyMemberDescr_Type) {
    PyErr_Format(PyExc_TypeError, "%s of %R is no slot", name, type);
    raise();
  }
  const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(descriptor.get())->d_member;
  if (member->type != T_OBJECT_EX) {
    PyErr_Format(PyExc_TypeError, "%s of %R is a slot of another kind", name, type);
    raise();
  }
  return Slot{member->offset};
}

// A class with `__slots__`, and what a new object has in each of them: taken from a sample that
// Python has made, so that it is said in one place.
class Layout {
 public:
  Layout() = default;
  Layout(PyObject* type, PyObject* sample) : type_(reinterpret_cast<PyTypeObject*>(type)) {
    Ref names = owned(PyObject_GetAttrString(type, "__slots__"));
    Ref all = owned(PySequence_List(names.get()));
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(all.get()); ++at) {
      const char* name = PyUnicode_AsUTF8(PyList_GET_ITEM(all.get(), at));
      if (name == nullptr) raise();
      if (std::string(name) == "__weakref__") continue;
      const Slot slot = slot_of(type, name);
      defaults_.emplace_back(slot, Ref::borrow(slot.in(sample)).release());  // for ever
    }
  }
  Ref make() const {
    Ref object = owned(type_->tp_alloc(type_, 0));
    for (const auto& [slot, content] : defaults_) {
      Py_XINCREF(content);
      slot.in(object.get()) = content;
    }
    return object;
  }
  bool is_type_of(PyObject* object) const { return Py_TYPE(object) == type_; }

 private:
  PyTypeObject* type_ = nullptr;
  std::vector<std::pair<Slot, PyObject*>> defaults_;
};

// ------------------------------------------------------------------------------------ what is known

// Python's side, as `connect` was told. These live as long as the process.
struct Known {
  PyObject *thread, *parameter, *tensor, *life, *watch_type, *atoms, *no_kwargs;
  PyObject *next_index, *info_of, *results_of, *each_once, *untrackable, *watch_storage;
  PyObject *keep, *rebuild, *hold, *nothing, *scratch, *all, *draws, *capture, *in_training;
  PyObject *running_statistics, *with_scratch, *as_replayed, *unpack;
  Layout value, operation, slice, read, handle;
  // of TapeValue
  Slot key, geometry, segment, op, position, version, write_pending, forward_tensor, death_watch;
  Slot unwritten, evictable, users, tensor_held, held_version, handles;
  // of TapeOperation
  Slot index, func, info, args, kwargs, inputs, outputs, written, random_state, slices;
  // of Handle, OpInfo, Segment and Tape
  Slot handle_tape, handle_value, handle_geometry, info_unwritten, scope, on_held;
  // of Slice and ParameterRef
  Slot slice_value, slice_geometry, read_content, read_source, read_version;
  // of _Link, Decisions and StorageWatch
  Slot outer, session, policy, watch_key;
  // of FollowingPolicy
  PyTypeObject* following;
  Slot expected, next_operation, next_value, segments;
  Slot in_rest, saves, saved_bytes, last_rebuilt, most_saves, most_bytes;
  // names
  PyObject *innermost, *copying, *decide, *remove_dead, *refer, *refer_all, *refer_kwargs, *root;
  PyObject *record, *begin_rest, *add_result, *name_segment, *name_recorded, *widens, *common;
  PyObject *copy_value, *move_out_written, *forget_before_write, *observer;
  PyObject *pack, *pack_root, *pack_written, *hold_evictable, *note_freed, *count_freed;
};

Known known;
bool connected = false;
bool enabled = true;
c10::DispatchKey listening_key = c10::DispatchKey::Undefined;

constexpr Py_ssize_t kFew = 8;    // as FEW in storage_table.py
constexpr Py_ssize_t kMany = 16;  // as _MANY in parameter_reads.py

// What a recorder gives to its link: see `Recorder._session`.
enum Session : Py_ssize_t {
  kRecorder,
  kTable,
  kValues,
  kRoots,
  kDead,
  kUnwatched,
  kSplitResults,
  kSavedTensors,
  kDecisions,
  kNoteDeath,
  kReadsByStorage,
  kInherited,
  kTape,
  kSessionSize,
};

// As `ExpectedOperation` in decisions.py.
enum Expected : Py_ssize_t {
  kFunc,
  kFirst,
  kMostBytes,
  kChoices,
  kSegmentNumber,
  kIsLast,
  kNextOperation,
  kNextValue,
  kIsMask,
  kExpectedSize,
};

PyObject* part(PyObject* session, Session which) { return PyTuple_GET_ITEM(session, which); }

// -------------------------------------------------------------------------------------- tensors

const at::Tensor& tensor_in(PyObject* object) { return THPVariable_Unpack(object); }

// Whether a tensor is what lies in its storage, and torch's own functions are all that is done to
// it. A subclass of Tensor without a dispatch of its own is plain in this sense.
bool is_plain(const at::Tensor& tensor) {
  if (!tensor.defined()) return true;
  static const c10::DispatchKeySet unusual =
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                           c10::DispatchKey::FuncTorchGradWrapper,
                           c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Functionalize,
                           c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                           c10::DispatchKey::ZeroTensor, c10::DispatchKey::Sparse,
                           c10::DispatchKey::SparseCsr, c10::DispatchKey::NestedTensor,
                           c10::DispatchKey::Quantized});
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return (impl->key_set() & unusual).empty() && tensor.layout() == at::kStrided &&
      impl->has_storage() && !impl->is_inference() && !impl->has_symbolic_sizes_strides();
}

bool is_plain(const IValue& argument) {
  if (argument.isTensor()) return is_plain(argument.toTensor());
  if (argument.isList()) {
    for (const IValue& item : argument.toListRef()) {
      if (item.isTensor() && !is_plain(item.toTensor())) return false;
    }
  }
  return true;
}

int64_t number_in(PyObject* object) {
  const int64_t content = PyLong_AsLongLong(object);
  if (content == -1 && PyErr_Occurred()) raise();
  return content;
}

Ref number(int64_t content) { return owned(PyLong_FromLongLong(content)); }

// `storage_key` in _torch.py.
Ref key_of(const at::Tensor& tensor) {
  return number(static_cast<int64_t>(
      reinterpret_cast<intptr_t>(tensor.storage().unsafeGetStorageImpl())));
}

Ref numbers_as(PyTypeObject* type, c10::IntArrayRef content) {
  Ref all = owned(type->tp_alloc(type, static_cast<Py_ssize_t>(content.size())));
  for (size_t at = 0; at < content.size(); ++at) {
    PyTuple_SET_ITEM(all.get(), static_cast<Py_ssize_t>(at), number(content[at]).release());
  }
  return all;
}

Ref strides_of(c10::IntArrayRef content) {
  Ref all = owned(PyTuple_New(static_cast<Py_ssize_t>(content.size())));
  for (size_t at = 0; at < content.size(); ++at) {
    PyTuple_SET_ITEM(all.get(), static_cast<Py_ssize_t>(at), number(content[at]).release());
  }
  return all;
}

// `geometry_of` in values.py; of a plain tensor it is also `place_of` in storage.py.
Ref geometry_of(const at::Tensor& tensor) {
  Ref shape = numbers_as(&THPSizeType, tensor.sizes());
  Ref strides = strides_of(tensor.strides());
  Ref offset = number(tensor.storage_offset());
  PyObject* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type()));
  return owned(PyTuple_Pack(4, shape.get(), strides.get(), offset.get(), dtype));
}

bool are_numbers(PyObject* tuple, c10::IntArrayRef content) {
  if (PyTuple_GET_SIZE(tuple) != static_cast<Py_ssize_t>(content.size())) return false;
  for (size_t at = 0; at < content.size(); ++at) {
    if (number_in(PyTuple_GET_ITEM(tuple, static_cast<Py_ssize_t>(at))) != content[at]) return false;
  }
  return true;
}

// Whether a plain tensor lies there in its storage: of `geometry_of`, without making one.
bool lies_at(const at::Tensor& tensor, PyObject* geometry) {
  return are_numbers(PyTuple_GET_ITEM(geometry, 0), tensor.sizes()) &&
      are_numbers(PyTuple_GET_ITEM(geometry, 1), tensor.strides()) &&
      number_in(PyTuple_GET_ITEM(geometry, 2)) == tensor.storage_offset() &&
      PyTuple_GET_ITEM(geometry, 3) ==
      reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type()));
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

bool is_leaf_with_gradient(const at::Tensor& tensor) {
  return tensor.requires_grad() && tensor.is_leaf();
}

// `References` in values.py with one more: one alone is in a tuple, several are in a list or a deque.
Ref with_another(PyObject* references, Ref reference) {
  if (references == Py_None) return owned(PyTuple_Pack(1, reference.get()));
  Ref all = PyTuple_CheckExact(references) ? owned(PySequence_List(references))
                                           : Ref::borrow(references);
  if (PyList_CheckExact(all.get())) {
    check(PyList_Append(all.get(), reference.get()));
  } else {
    static PyObject* const append = PyUnicode_InternFromString("append");
    call_method(all.get(), append, reference.get());
  }
  return all;
}

Ref weak(PyObject* object) { return owned(PyWeakref_NewRef(object, nullptr)); }

// What a weak reference, or another function that gives a tensor, gives now; never nullptr.
Ref alive(PyObject* reference) {
  if (Py_TYPE(reference) == &_PyWeakref_RefType) {
    return Ref::borrow(PyWeakref_GET_OBJECT(reference));
  }
  return call(reference);
}

// `detached` in _torch.py: what the dispatcher would do for it, without it.
Ref alias_of(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return owned(THPVariable_Wrap(at::Tensor(impl->shallow_copy_and_detach(
      impl->version_counter(), /*allow_tensor_metadata_change=*/true))));
}

// `watch_storage` in _torch_storage.py.
Ref watch(const at::Tensor& tensor, PyObject* note_death) {
  Ref storage = owned(THPStorage_Wrap(tensor.storage()));
  Ref attributes = owned(PyObject_GenericGetDict(storage.get(), nullptr));
  if (PyDict_CheckExact(attributes.get()) && PyDict_GET_SIZE(attributes.get()) == 0) {
    Ref life = call(known.life);
    check(PyObject_GenericSetDict(storage.get(), life.get(), nullptr));
    return call(known.watch_type, life.get(), note_death);
  }
  return call(known.watch_storage, storage.get(), note_death);
}

// ------------------------------------------------------------------------------------- recording

// `StorageTable.remove_dead`.
void remove_dead(PyObject* session) {
  PyObject* dead = part(session, kDead);
  if (PyList_GET_SIZE(dead) == 0) return;
  if (PyDict_GET_SIZE(part(session, kSplitResults)) != 0) {
    call_method(part(session, kTable), known.remove_dead);
    return;
  }
  PyObject* values = part(session, kValues);
  while (const Py_ssize_t count = PyList_GET_SIZE(dead)) {
    Ref gone = Ref::borrow(PyList_GET_ITEM(dead, count - 1));
    check(PyList_SetSlice(dead, count - 1, count, nullptr));
    Ref key = Ref::borrow(known.watch_key.in(gone.get()));
    Ref value = Ref::borrow(key ? PyDict_GetItemWithError(values, key.get()) : nullptr);
    if (!value) {
      if (PyErr_Occurred()) raise();
      continue;
    }
    if (known.death_watch.in(value.get()) == gone.get()) check(PyDict_DelItem(values, key.get()));
  }
}

// One operation, as it is recorded.
struct Recording {
  PyObject* session;
  PyObject* func;
  PyObject* info;
  PyObject* args;
  PyObject* kwargs;  // nullptr: none
  PyObject* out;
  PyObject* random_state;  // nullptr: none

  PyObject* table() const { return part(session, kTable); }
  PyObject* values() const { return part(session, kValues); }
  PyObject* keywords() const { return kwargs == nullptr ? known.no_kwargs : kwargs; }

  void record(PyObject* choices, PyObject* results);
  Ref reference_to(PyObject* argument, PyObject* inputs, bool of_method);
  Ref reference_to_tensor(PyObject* argument, PyObject* inputs, bool of_method);
  Ref refer_parameter(PyObject* argument, const at::Tensor& tensor);
  Ref hold(PyObject* argument, const at::Tensor& tensor, PyObject* key);
  Ref refer_kwargs(PyObject* inputs);
  bool refer_all(Ref& references, Ref& named, Ref& inputs, PyObject* method_of);
  bool is_there(PyObject* key);
  bool is_read(PyObject* key, PyObject* inputs);
  Ref make_operation(Ref references, Ref named, Ref inputs);
  Ref make_value(PyObject* key, Ref geometry, PyObject* op, Py_ssize_t position, int64_t version,
                 Ref forward_tensor, Ref death_watch);
  Ref add_result(PyObject* op, Py_ssize_t position, PyObject* tensor, PyObject* key,
                 PyObject* choice);
  void register_operation(PyObject* op);
};

// `add_input` in storage_table.py.
void add_input(PyObject* value, PyObject* inputs) {
  if (PyList_GET_SIZE(inputs) <= kFew) {
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(inputs); ++at) {
      if (PyList_GET_ITEM(inputs, at) == value) return;
    }
  }
  check(PyList_Append(inputs, value));
}

// `ParameterReads.refer`, with `ParameterRef.__init__`.
Ref Recording::refer_parameter(PyObject* argument, const at::Tensor& tensor) {
  Ref read = known.read.make();
  known.read_content.set(read.get(), owned(THPVariable_Wrap(tensor.variable_data())));
  known.read_source.set(read.get(), Ref::borrow(argument));
  known.read_version.set(read.get(), number(version_of(tensor)));
  Ref reference = weak(read.get());
  Ref key = key_of(tensor);
  PyObject* by_storage = part(session, kReadsByStorage);
  Ref others = Ref::borrow(PyDict_GetItemWithError(by_storage, key.get()));
  if (!others) {
    if (PyErr_Occurred()) raise();
    Ref first = owned(PyList_New(1));
    PyList_SET_ITEM(first.get(), 0, reference.release());
    check(PyDict_SetItem(by_storage, key.get(), first.get()));
    return read;
  }
  check(PyList_Append(others.get(), reference.get()));
  const Py_ssize_t count = PyList_GET_SIZE(others.get());
  if (count >= kMany && (count & (count - 1)) == 0) {
    Ref left = owned(PyList_New(0));
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(others.get()); ++at) {
      Ref one = Ref::borrow(PyList_GET_ITEM(others.get(), at));
      if (PyWeakref_GET_OBJECT(one.get()) != Py_None) check(PyList_Append(left.get(), one.get()));
    }
    check(PyList_SetSlice(others.get(), 0, PyList_GET_SIZE(others.get()), left.get()));
  }
  return read;
}

bool is_equal(PyObject* one, PyObject* other) {
  const int same = PyObject_RichCompareBool(one, other, Py_EQ);
  check(same);
  return same == 1;
}

// `only_recorded_writes` in version_counters.py.
bool only_recorded_writes(PyObject* value, int64_t version) {
  const int64_t before = number_in(known.version.in(value));
  return before == version || before == -1 ||
      (known.write_pending.in(value) != Py_False && version == before + 1);
}

// Of `StorageTable.find`: whether a value is what its storage holds, if no tensor on it counts for
// itself; then its counter is brought up to date.
bool is_present(PyObject* session, PyObject* value, int64_t version) {
  if (known.unwritten.in(value) != Py_None) return false;
  if (number_in(known.version.in(value)) == version &&
      known.write_pending.in(value) == Py_False) {
    return true;
  }
  if (PyDict_GET_SIZE(part(session, kSplitResults)) != 0 ||
      !only_recorded_writes(value, version)) {
    return false;
  }
  known.version.set(value, number(version));
  known.write_pending.set(value, Ref::borrow(Py_False));
  return true;
}

// The root that a storage holds; nullptr: none.
Ref root_of(PyObject* session, PyObject* key) {
  PyObject* reference = PyDict_GetItemWithError(part(session, kRoots), key);
  if (reference == nullptr) {
    if (PyErr_Occurred()) raise();
    return Ref();
  }
  Ref root = alive(reference);
  return root.get() == Py_None ? Ref() : std::move(root);
}

// Of `StorageTable.refer`: makes a root of a tensor that the tape has not seen. nullptr: Python has
// to say what it is.
Ref Recording::hold(PyObject* argument, const at::Tensor& tensor, PyObject* key) {
  if (!tensor.storage().resizable() || at::MapAllocator::fromDataPtr(tensor.storage().data_ptr())) {
    return Ref();  // somebody else may have its memory
  }
  Ref segment = owned(PyObject_GetAttr(table(), known.name_segment));
  if (known.scope.in(segment.get()) != Py_None) return Ref();
  Ref alias = alias_of(tensor);
  Ref value = known.value.make();
  known.key.set(value.get(), Ref::borrow(key));
  known.geometry.set(value.get(), geometry_of(tensor));
  known.segment.set(value.get(), std::move(segment));
  known.tensor_held.set(value.get(), std::move(alias));
  known.forward_tensor.set(value.get(), weak(argument));
  known.version.set(value.get(), number(version_of(tensor)));
  known.held_version.set(value.get(), number(version_of(tensor)));
  Ref reference = weak(value.get());
  check(PyDict_SetItem(part(session, kRoots), key, reference.get()));
  return value;
}

// What stands for a tensor of torch's own class: as in `Recorder._record`, or, for an argument of a
// method that writes, as in `StorageTable.refer`.
Ref Recording::reference_to_tensor(PyObject* argument, PyObject* inputs, bool of_method) {
  const at::Tensor& tensor = tensor_in(argument);
  const int64_t version = version_of(tensor);
  Ref key = key_of(tensor);
  Ref value = Ref::borrow(PyDict_GetItemWithError(values(), key.get()));
  if (value) {
    if (!is_present(session, value.get(), version)) value = Ref();
  } else {
    if (PyErr_Occurred()) raise();
    if (!of_method && tensor.is_view()) {  // `_record` looks for a parameter first
      const at::Tensor base(tensor._base());
      Ref owner = owned(THPVariable_Wrap(base));
      if (reinterpret_cast<PyObject*>(Py_TYPE(owner.get())) == known.parameter &&
          is_leaf_with_gradient(base)) {
        return refer_parameter(argument, tensor);
      }
    }
    value = root_of(session, key.get());
    if (!value) {
      const at::Tensor owner = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
      if (is_leaf_with_gradient(owner)) return refer_parameter(argument, tensor);
      value = hold(argument, tensor, key.get());
    } else if (PyDict_GET_SIZE(part(session, kSplitResults)) != 0 ||
               !is_present(session, value.get(), version)) {
      value = Ref();
    }
  }
  if (!value) return call_method(table(), known.refer, argument, inputs);
  add_input(value.get(), inputs);
  if (lies_at(tensor, known.geometry.in(value.get()))) return value;
  Ref slice = known.slice.make();
  known.slice_value.set(slice.get(), std::move(value));
  known.slice_geometry.set(slice.get(), geometry_of(tensor));
  return slice;
}

bool is_atom(PyObject* object) {
  if (object == Py_None) return true;
  PyTypeObject* type = Py_TYPE(object);
  if (type == &PyLong_Type || type == &PyFloat_Type || type == &PyBool_Type) return true;
  const int found = PySet_Contains(known.atoms, reinterpret_cast<PyObject*>(type));
  check(found);
  return found == 1;
}

Ref Recording::reference_to(PyObject* argument, PyObject* inputs, bool of_method) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(argument));
  if (type == known.tensor) return reference_to_tensor(argument, inputs, of_method);
  if (type == known.parameter) {
    const at::Tensor& tensor = tensor_in(argument);
    if (of_method) return call_method(table(), known.refer, argument, inputs);
    if (is_leaf_with_gradient(tensor)) return refer_parameter(argument, tensor);
  } else if (is_atom(argument) || type == known.scratch) {
    return Ref::borrow(argument);
  } else if (PyList_CheckExact(argument)) {
    if (!of_method && PyList_GET_SIZE(argument) && PyLong_CheckExact(PyList_GET_ITEM(argument, 0))) {
      return Ref::borrow(argument);
    }
    return call_method(table(), known.refer_all, argument, inputs);
  }
  Ref one = owned(PyTuple_Pack(1, argument));
  Ref many = call_method(table(), known.refer_all, one.get(), inputs);
  return Ref::borrow(PyList_GET_ITEM(many.get(), 0));
}

// `StorageTable.refer_kwargs`.
Ref Recording::refer_kwargs(PyObject* inputs) {
  if (kwargs == nullptr) return Ref::borrow(known.no_kwargs);
  Py_ssize_t at = 0;
  PyObject *name, *argument;
  while (PyDict_Next(kwargs, &at, &name, &argument)) {
    if (!is_atom(argument)) return call_method(table(), known.refer_kwargs, kwargs, inputs);
  }
  return owned(PyDict_Copy(kwargs));
}

// All arguments; false where the operation cannot be replayed (rule 5). Of a method that writes, the
// first one is the value that it writes to.
bool Recording::refer_all(Ref& references, Ref& named, Ref& inputs, PyObject* method_of) {
  inputs = owned(PyList_New(0));
  const Py_ssize_t count = PyTuple_GET_SIZE(args);
  references = owned(PyList_New(count));
  for (Py_ssize_t at = 0; at < count; ++at) {
    PyList_SET_ITEM(references.get(), at, Ref::borrow(Py_None).release());
  }
  Py_ssize_t at = 0;
  if (method_of != nullptr) {
    check(PyList_Append(inputs.get(), method_of));
    check(PyList_SetItem(references.get(), at++, Ref::borrow(method_of).release()));
  }
  try {
    for (; at < count; ++at) {
      Ref reference = reference_to(PyTuple_GET_ITEM(args, at), inputs.get(), method_of != nullptr);
      check(PyList_SetItem(references.get(), at, reference.release()));
    }
    named = refer_kwargs(inputs.get());
  } catch (python_error& error) {
    error.restore();
    const bool is_rule_5 = PyErr_ExceptionMatches(known.untrackable) ||
        (method_of == nullptr && PyErr_ExceptionMatches(PyExc_RuntimeError));
    if (!is_rule_5) raise();
    PyErr_Clear();
    return false;
  }
  if (PyList_GET_SIZE(inputs.get()) > kFew) inputs = call(known.each_once, inputs.get());
  return true;
}

// Whether a storage is in the table already: then an operation gave back a tensor that was there.
bool Recording::is_there(PyObject* key) {
  int found = PyDict_Contains(values(), key);
  check(found);
  if (found) return true;
  found = PyDict_Contains(part(session, kRoots), key);
  check(found);
  if (!found) return false;
  return call_method(table(), known.root, key).get() != Py_None;
}

bool Recording::is_read(PyObject* key, PyObject* inputs) {
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(inputs); ++at) {
    Ref value = Ref::borrow(PyList_GET_ITEM(inputs, at));
    if (is_equal(known.key.in(value.get()), key)) return true;
  }
  return false;
}

Ref Recording::make_operation(Ref references, Ref named, Ref inputs) {
  Ref op = known.operation.make();
  known.index.set(op.get(), call(known.next_index));
  known.func.set(op.get(), Ref::borrow(func));
  known.info.set(op.get(), Ref::borrow(info));
  known.args.set(op.get(), std::move(references));
  known.kwargs.set(op.get(), std::move(named));
  known.inputs.set(op.get(), std::move(inputs));
  if (random_state != nullptr) known.random_state.set(op.get(), Ref::borrow(random_state));
  return op;
}

// `TapeValue.__init__`, in the table's present segment.
Ref Recording::make_value(PyObject* key, Ref geometry, PyObject* op, Py_ssize_t position,
                          int64_t version, Ref forward_tensor, Ref death_watch) {
  Ref segment = owned(PyObject_GetAttr(table(), known.name_segment));
  Ref value = known.value.make();
  known.key.set(value.get(), Ref::borrow(key));
  known.geometry.set(value.get(), std::move(geometry));
  known.segment.set(value.get(), std::move(segment));
  known.op.set(value.get(), Ref::borrow(op));
  known.position.set(value.get(), number(position));
  known.version.set(value.get(), number(version));
  known.forward_tensor.set(value.get(), std::move(forward_tensor));
  known.death_watch.set(value.get(), std::move(death_watch));
  return value;
}

// `StorageTable.add_result`, of a plain tensor: what its operation refers to it by.
Ref Recording::add_result(PyObject* op, Py_ssize_t position, PyObject* tensor, PyObject* key,
                          PyObject* choice) {
  const int found = PyDict_Contains(values(), key);
  check(found);
  if (found) return Ref::borrow(Py_None);
  const at::Tensor& content = tensor_in(tensor);
  if (choice != known.rebuild && choice != known.hold) {
    Ref place = number(position);
    return call_method(table(), known.add_result, op, place.get(), tensor, key, choice);
  }
  Ref geometry = geometry_of(content);
  Ref death_watch = watch(content, part(session, kNoteDeath));
  known.watch_key.set(death_watch.get(), Ref::borrow(key));
  Ref value = make_value(key, std::move(geometry), op, position, version_of(content), weak(tensor),
                         std::move(death_watch));
  PyObject* unwritten = known.info_unwritten.in(info);
  if (unwritten != Py_None) known.unwritten.set(value.get(), Ref::borrow(unwritten));
  if (choice == known.hold) known.evictable.set(value.get(), Ref::borrow(Py_True));
  check(PyDict_SetItem(values(), key, value.get()));
  return weak(value.get());
}

// `StorageTable.register`.
void Recording::register_operation(PyObject* op) {
  Ref reference = weak(op);
  Ref segment = owned(PyObject_GetAttr(table(), known.name_segment));
  Ref inputs = Ref::borrow(known.inputs.in(op));
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(inputs.get()); ++at) {
    Ref value = Ref::borrow(PyList_GET_ITEM(inputs.get(), at));
    if (known.op.in(value.get()) == Py_None) continue;
    Ref users = Ref::borrow(known.users.in(value.get()));
    known.users.set(value.get(), with_another(users.get(), Ref::borrow(reference.get())));
    PyObject* own = known.segment.in(value.get());
    if (own != segment.get()) {
      Ref widens = owned(PyObject_GetAttr(table(), known.widens));
      if (widens.get() == Py_True) {
        Ref held = Ref::borrow(own);
        known.segment.set(value.get(), call_method(held.get(), known.common, segment.get()));
      }
    }
  }
  Ref recorded = owned(PyObject_GetAttr(table(), known.name_recorded));
  if (recorded.get() != Py_None) call(recorded.get(), op);
}

bool is_plain_object(PyObject* object) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == known.tensor &&
      is_plain(tensor_in(object));
}

// `Recorder._record`; choices and results are nullptr for none.
void Recording::record(PyObject* choices, PyObject* results) {
  const bool is_single = is_plain_object(out);
  bool is_usual = is_single;
  if (!is_single && PyTuple_CheckExact(out)) {  // several, each a tensor or None
    is_usual = true;
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(out) && is_usual; ++at) {
      PyObject* one = PyTuple_GET_ITEM(out, at);
      is_usual = is_plain_object(one) || one == Py_None || PyLong_CheckExact(one);
    }
    if (choices != nullptr && is_usual) {
      is_usual = PyTuple_GET_SIZE(out) == PyList_GET_SIZE(results);
    }
  }
  if (!is_usual) {
    call_method(part(session, kRecorder), known.record, func, info, args, keywords(), out,
                random_state == nullptr ? Py_None : random_state,
                choices == nullptr ? Py_None : choices, results == nullptr ? Py_None : results);
    return;
  }
  remove_dead(session);
  Ref references, named, inputs;
  if (!refer_all(references, named, inputs, nullptr)) return;
  struct Result {
    Py_ssize_t position;
    PyObject* tensor;  // `out` has it
    Ref key;
  };
  std::vector<Result> results_new;
  if (is_single) {
    results_new.push_back({0, out, key_of(tensor_in(out))});
  } else {  // `_new_results`
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(out); ++at) {
      PyObject* one = PyTuple_GET_ITEM(out, at);
      if (reinterpret_cast<PyObject*>(Py_TYPE(one)) != known.tensor) continue;
      Ref key = key_of(tensor_in(one));
      if (!is_read(key.get(), inputs.get())) results_new.push_back({at, one, std::move(key)});
    }
    if (results_new.empty()) return;
  }
  if (is_there(results_new[0].key.get())) return;
  if (PyDict_GET_SIZE(part(session, kUnwatched)) != 0 &&
      is_read(results_new[0].key.get(), inputs.get())) {
    return;
  }
  Ref op = make_operation(std::move(references), std::move(named), std::move(inputs));
  if (is_single) {
    PyObject* choice = choices == nullptr ? known.rebuild : PyTuple_GET_ITEM(choices, 0);
    if (choice == known.keep) return;
    Ref result = add_result(op.get(), 0, out, results_new[0].key.get(), choice);
    known.outputs.set(op.get(), with_another(Py_None, std::move(result)));
    register_operation(op.get());
    return;
  }
  for (size_t at = 1; at < results_new.size(); ++at) {  // `Recorder._add_several`
    if (is_there(results_new[at].key.get())) return;
  }
  Ref outputs = owned(PyList_New(0));
  known.outputs.set(op.get(), Ref::borrow(outputs.get()));
  for (const Result& one : results_new) {  // `StorageTable.add`
    // by position: all results are tensors, so that there is a choice for each
    PyObject* choice =
        choices == nullptr ? known.rebuild : PyTuple_GET_ITEM(choices, one.position);
    Ref result = choice == known.keep
        ? Ref::borrow(Py_None)
        : add_result(op.get(), one.position, one.tensor, one.key.get(), choice);
    check(PyList_Append(outputs.get(), result.get()));
  }
  register_operation(op.get());
}

// What becomes of the results of an operation that has run: `Decisions.of`, and the same in
// `Recorder._observe`.
struct Decided {
  Ref choices;  // a tuple; nullptr: all are rebuilt
  Ref results;
  bool all_kept = false;
  bool is_last = false;
};

// What a policy expects next, if it is a `FollowingPolicy` that does, and this is it but for the
// results; else nullptr.
Ref expected_by(PyObject* policy, PyObject* func) {
  if (!PyObject_TypeCheck(policy, known.following)) return Ref();
  PyObject* all = known.expected.in(policy);
  if (all == nullptr || !PyList_CheckExact(all)) return Ref();
  const int64_t at = number_in(known.next_operation.in(policy));
  if (at < 0 || at >= PyList_GET_SIZE(all)) return Ref();
  PyObject* one = PyList_GET_ITEM(all, at);
  if (one == Py_None || PyTuple_GET_ITEM(one, kFunc) != func ||
      number_in(PyTuple_GET_ITEM(one, kFirst)) != number_in(known.next_value.in(policy))) {
    return Ref();
  }
  return Ref::borrow(one);
}

// `fills_storage` in storage.py.
bool fills_storage(const at::Tensor& tensor) {
  return tensor.nbytes() == tensor.storage().nbytes() && tensor.is_non_overlapping_and_dense();
}

// `_fit` in follow_plan.py, of one result.
bool fits(PyObject* expected, Py_ssize_t which, const at::Tensor& result) {
  if (!result.defined() || !is_plain(result)) return false;
  const int64_t most = number_in(PyTuple_GET_ITEM(PyTuple_GET_ITEM(expected, kMostBytes), which));
  if (most != 0 && static_cast<int64_t>(result.storage().nbytes()) > most) return false;
  return PyTuple_GET_ITEM(expected, kIsMask) != Py_True ||
      (result.element_size() > 1 && fills_storage(result));
}

Py_ssize_t count_of(PyObject* expected) {
  return PyTuple_GET_SIZE(PyTuple_GET_ITEM(expected, kMostBytes));
}

// The rest of `PlanFollower.decide`: the policy goes on behind this operation.
void go_on(PyObject* policy, PyObject* expected) {
  known.next_operation.set(policy, Ref::borrow(PyTuple_GET_ITEM(expected, kNextOperation)));
  known.next_value.set(policy, Ref::borrow(PyTuple_GET_ITEM(expected, kNextValue)));
}

// Whether these are the results of what the policy expects; then it goes on.
Ref pass_expected(PyObject* policy, PyObject* func, PyObject* results) {
  Ref expected = expected_by(policy, func);
  if (!expected || count_of(expected.get()) != PyList_GET_SIZE(results)) return Ref();
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(results); ++at) {
    PyObject* one = PyList_GET_ITEM(results, at);
    if (!THPVariable_Check(one) || !fits(expected.get(), at, tensor_in(one))) return Ref();
  }
  go_on(policy, expected.get());
  return expected;
}

// Whether a policy that follows a plan expects as many results as are in this tuple: then all are,
// as they were when Python has looked at them.
bool are_expected(PyObject* policy, PyObject* func, PyObject* out) {
  if (!PyTuple_CheckExact(out)) return false;
  Ref expected = expected_by(policy, func);
  if (!expected || count_of(expected.get()) != PyTuple_GET_SIZE(out)) return false;
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(out); ++at) {
    if (!is_plain_object(PyTuple_GET_ITEM(out, at))) return false;
  }
  return true;
}

// The results are `target` alone, if that is not nullptr.
Decided decide(const Recording& operation, PyObject* target) {
  Decided decided;
  PyObject* session = operation.session;
  Ref policy = Ref::borrow(known.policy.in(part(session, kDecisions)));
  if (policy.get() == Py_None) return decided;
  PyObject* out = target == nullptr ? operation.out : target;
  if (reinterpret_cast<PyObject*>(Py_TYPE(out)) == known.tensor) {
    decided.results = owned(PyList_New(1));
    PyList_SET_ITEM(decided.results.get(), 0, Ref::borrow(out).release());
  } else if (are_expected(policy.get(), operation.func, out)) {
    decided.results = owned(PySequence_List(out));
  } else {
    decided.results =
        call(known.results_of, operation.info, operation.args, operation.keywords(), out);
  }
  if (PyList_GET_SIZE(decided.results.get()) == 0) {
    decided.all_kept = true;
    return decided;
  }
  if (Ref expected = pass_expected(policy.get(), operation.func, decided.results.get())) {
    PyObject* choices = PyTuple_GET_ITEM(expected.get(), kChoices);
    decided.all_kept = choices == Py_None;
    decided.is_last = PyTuple_GET_ITEM(expected.get(), kIsLast) == Py_True;
    if (!decided.all_kept) {
      decided.choices = Ref::borrow(choices);
      const int64_t which = number_in(PyTuple_GET_ITEM(expected.get(), kSegmentNumber));
      Ref segment = owned(PySequence_GetItem(known.segments.in(policy.get()), which));
      check(PyObject_SetAttr(part(session, kTable), known.name_segment, segment.get()));
    }
    return decided;
  }
  Ref decision = call_method(policy.get(), known.decide, operation.func, decided.results.get(),
                             operation.args, operation.keywords());
  if (decision.get() == Py_None) return decided;
  if (!PyTuple_Check(decision.get()) || PyTuple_GET_SIZE(decision.get()) != 3) {
    PyErr_Format(PyExc_TypeError, "a policy decided %R, which is no TapeDecision", decision.get());
    raise();
  }
  PyObject* choices = PyTuple_GET_ITEM(decision.get(), 0);
  PyObject* segment = PyTuple_GET_ITEM(decision.get(), 1);
  if (segment != Py_None) {
    check(PyObject_SetAttr(part(session, kTable), known.name_segment, segment));
  }
  decided.all_kept = choices == Py_None;
  if (!decided.all_kept) decided.choices = owned(PySequence_Tuple(choices));
  const int is_last = PyObject_IsTrue(PyTuple_GET_ITEM(decision.get(), 2));
  check(is_last);
  decided.is_last = is_last == 1;
  return decided;
}

void begin_rest(PyObject* session) {
  call_method(part(session, kRecorder), known.begin_rest);
}

// `WriteRecorder.run_method`: a method that writes to the very tensor that an operation returned.
class Method {
 public:
  explicit Method(Recording& operation)
      : operation_(operation), session_(operation.session),
        target_(PyTuple_GET_SIZE(operation.args) ? PyTuple_GET_ITEM(operation.args, 0) : nullptr) {}

  // Whether it is usual, so that Python need not be asked.
  bool is_usual(bool reads_written) {
    if (target_ == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(target_)) != known.tensor ||
        PyDict_GET_SIZE(part(session_, kInherited)) != 0) {
      return false;
    }
    const at::Tensor& tensor = tensor_in(target_);
    key_ = key_of(tensor);
    old_ = Ref::borrow(PyDict_GetItemWithError(operation_.values(), key_.get()));
    if (!old_) {
      if (PyErr_Occurred()) raise();
      return false;
    }
    if (alive(known.forward_tensor.in(old_.get())).get() != target_ ||
        !lies_at(tensor, known.geometry.in(old_.get())) ||
        !only_recorded_writes(old_.get(), version_of(tensor)) ||
        (known.unwritten.in(old_.get()) != Py_None && reads_written)) {
      return false;
    }
    const int is_split = PyDict_Contains(part(session_, kSplitResults), key_.get());
    check(is_split);
    return is_split == 0;
  }

  void before() {
    known.unwritten.set(old_.get(), Ref::borrow(Py_None));
    Ref references, named, inputs;
    if (operation_.refer_all(references, named, inputs, old_.get())) {
      op_ = operation_.make_operation(std::move(references), std::move(named), std::move(inputs));
    }
    if (known.tensor_held.in(old_.get()) != Py_None) {
      call_method(operation_.table(), known.copy_value, old_.get());
    }
  }

  void after() {
    Decided decided = decide(operation_, target_);
    Ref death_watch = Ref::borrow(known.death_watch.in(old_.get()));
    Ref forward_tensor = Ref::borrow(known.forward_tensor.in(old_.get()));
    known.death_watch.set(old_.get(), Ref::borrow(Py_None));
    known.forward_tensor.set(old_.get(), Ref::borrow(known.nothing));
    PyObject* choice = known.rebuild;
    if (decided.choices) choice = PyTuple_GET_ITEM(decided.choices.get(), 0);
    if (!op_ || decided.all_kept || (choice != known.rebuild && choice != known.hold)) {
      const int found = PyDict_Contains(operation_.values(), key_.get());
      check(found);
      if (found) check(PyDict_DelItem(operation_.values(), key_.get()));
      Ref targets = owned(PyTuple_Pack(1, target_));
      PyObject* choices = decided.all_kept ? known.all : decided.choices.get();
      call_method(operation_.table(), known.move_out_written, targets.get(),
                  choices == nullptr ? Py_None : choices);
    } else {
      known.written.set(op_.get(), owned(PyTuple_Pack(1, old_.get())));
      Ref value = operation_.make_value(
          key_.get(), Ref::borrow(known.geometry.in(old_.get())), op_.get(), -1,
          version_of(tensor_in(target_)), std::move(forward_tensor), std::move(death_watch));
      known.write_pending.set(value.get(), Ref::borrow(Py_True));
      if (choice == known.hold) known.evictable.set(value.get(), Ref::borrow(Py_True));
      check(PyDict_SetItem(operation_.values(), key_.get(), value.get()));
      known.outputs.set(op_.get(), with_another(Py_None, weak(value.get())));
      operation_.register_operation(op_.get());
    }
    if (decided.is_last) begin_rest(session_);
  }

 private:
  Recording& operation_;
  PyObject* session_;
  PyObject* target_;
  Ref key_, old_, op_;
};

// --------------------------------------------------------------------------------------- listening

// An operator's kernel on the key that listeners have.
class Listening final : public c10::OperatorKernel {
 public:
  Listening(const c10::FunctionSchema& schema, PyObject* overload, PyObject* heard)
      : overload_(Ref::borrow(overload).release()), heard_(Ref::borrow(heard).release()) {
    for (const c10::Argument& argument : schema.arguments()) {
      arguments_.push_back(
          {kind_of(argument), argument.kwarg_only(), argument.default_value(),
           owned(PyUnicode_InternFromString(argument.name().c_str())).release()});
    }
    for (const c10::Argument& returned : schema.returns()) returns_.push_back(returned.type());
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    pybind11::gil_scoped_acquire gil;
    const size_t count = arguments_.size();
    const auto first = stack->end() - static_cast<ptrdiff_t>(count);
    std::vector<IValue> arguments;
    arguments.reserve(count);
    Ref session = enabled ? usual_session(first, stack->end()) : Ref();
    if (!session) {
      std::move(first, stack->end(), std::back_inserter(arguments));
      stack->erase(first, stack->end());
      Ref args, kwargs;
      convert(arguments, args, kwargs);
      ask_python(args.get(), kwargs.get(), stack);
      return;
    }
    if (path_ == Path::kView) {
      c10::impl::ExcludeDispatchKeyGuard nobody_hears{c10::DispatchKeySet(listening_key)};
      run(op, stack);
      return;
    }
    std::copy(first, stack->end(), std::back_inserter(arguments));
    if (is_to_be_kept(session.get(), arguments)) {
      run_kept(op, session.get(), arguments, stack);
      return;
    }
    Ref args, kwargs;
    convert(arguments, args, kwargs);
    Recording operation{session.get(), overload_, info_, args.get(), kwargs.get(), nullptr, nullptr};
    if (path_ == Path::kMethod) {
      run_method(op, operation, stack);
      return;
    }
    c10::impl::ExcludeDispatchKeyGuard nobody_hears{c10::DispatchKeySet(listening_key)};
    if (path_ == Path::kSpecial) {
      run_special(op, operation, stack);
      return;
    }
    run(op, stack);
    Ref out = returned(*stack);
    operation.out = out.get();
    Decided decided = decide(operation, nullptr);
    if (!decided.all_kept) operation.record(decided.choices.get(), decided.results.get());
    if (decided.is_last) begin_rest(session.get());
  }

 private:
  enum class Kind { kOther, kDtype, kLayout, kMemoryFormat };
  struct Described {
    Kind kind;
    bool is_keyword;
    std::optional<IValue> default_value;
    PyObject* name;
  };

  static Kind kind_of(const c10::Argument& argument) {
    c10::TypePtr type = argument.real_type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    switch (type->kind()) {
      case c10::TypeKind::ScalarTypeType: return Kind::kDtype;
      case c10::TypeKind::LayoutType: return Kind::kLayout;
      case c10::TypeKind::MemoryFormatType: return Kind::kMemoryFormat;
      default: return Kind::kOther;
    }
  }

  // How an operator is recorded.
  enum class Path { kUnknown, kPython, kView, kSimple, kSpecial, kMethod };

  static void run(const c10::OperatorHandle& op, Stack* stack) {
    pybind11::gil_scoped_release while_it_runs;
    op.callBoxed(stack);
  }

  // The state of the generator that an operation is about to draw from, if it does.
  Ref random_state(const Recording& operation) const {
    if (!is_random_) return Ref();
    Ref draws = call(known.draws, info_, operation.args, operation.keywords());
    if (draws.get() != Py_True) return Ref();
    return call(known.capture, operation.args, operation.keywords());
  }

  // `Recorder._run_unusual` for a method that writes to its tensor.
  void run_method(const c10::OperatorHandle& op, Recording& operation, Stack* stack) const {
    remove_dead(operation.session);
    Method method(operation);
    if (!method.is_usual(reads_written_)) {
      stack->erase(stack->end() - static_cast<ptrdiff_t>(arguments_.size()), stack->end());
      ask_python(operation.args, operation.kwargs, stack);
      return;
    }
    c10::impl::ExcludeDispatchKeyGuard nobody_hears{c10::DispatchKeySet(listening_key)};
    Ref state = random_state(operation);
    operation.random_state = state.get();
    method.before();
    run(op, stack);
    method.after();
  }

  // Whether a plan is followed that has this operation next, and keeps its results, so that nothing
  // is written down if they are no larger than the plan's.
  bool is_to_be_kept(PyObject* session, const std::vector<IValue>& arguments) const {
    if (has_scratch_ || (path_ == Path::kMethod && !writes_to_unknown(session, arguments))) {
      return false;
    }
    PyObject* policy = known.policy.in(part(session, kDecisions));
    if (policy == Py_None) return false;
    Ref expected = expected_by(policy, overload_);
    return expected && PyTuple_GET_ITEM(expected.get(), kChoices) == Py_None &&
        PyTuple_GET_ITEM(expected.get(), kIsLast) == Py_False;
  }

  // As `WriteRecorder._run_on_unknown`, where nobody needs a copy of what is there.
  bool writes_to_unknown(PyObject* session, const std::vector<IValue>& arguments) const {
    if (returns_.size() != 1 || arguments.empty() || !arguments[0].isTensor()) return false;
    const at::Tensor& target = arguments[0].toTensor();
    if (!target.defined() || !target.storage().resizable() ||
        PyDict_GET_SIZE(part(session, kInherited)) != 0 ||
        PyDict_GET_SIZE(part(session, kUnwatched)) != 0) {
      return false;
    }
    remove_dead(session);
    Ref key = key_of(target);
    for (PyObject* there : {part(session, kValues), part(session, kRoots),
                            part(session, kReadsByStorage)}) {
      const int found = PyDict_Contains(there, key.get());
      check(found);
      if (found) return false;
    }
    return true;
  }

  // What `Recorder._observe` and `_run_unusual` do where all results are kept.
  void run_kept(const c10::OperatorHandle& op, PyObject* session,
                const std::vector<IValue>& arguments, Stack* stack) const {
    c10::impl::ExcludeDispatchKeyGuard nobody_hears{c10::DispatchKeySet(listening_key)};
    if (path_ == Path::kSpecial) remove_dead(session);
    run(op, stack);
    Ref policy = Ref::borrow(known.policy.in(part(session, kDecisions)));
    if (passes(policy.get(), *stack)) return;
    // Another operation than the plan's after all: the policy says what that means. If it were not
    // to be kept, it would be a root.
    Ref args, kwargs, out = returned(*stack);
    convert(arguments, args, kwargs);
    Recording operation{session, overload_, info_, args.get(), kwargs.get(), out.get(), nullptr};
    const bool writes = path_ == Path::kMethod;
    Decided decided = decide(operation, writes ? PyTuple_GET_ITEM(args.get(), 0) : nullptr);
    if (decided.is_last) begin_rest(session);
  }

  // `pass_expected`, of results on the stack.
  bool passes(PyObject* policy, const Stack& stack) const {
    Ref expected = policy == Py_None ? Ref() : expected_by(policy, overload_);
    const size_t count = returns_.size();
    if (!expected || count_of(expected.get()) != static_cast<Py_ssize_t>(count)) return false;
    for (size_t at = 0; at < count; ++at) {
      const IValue& one = stack[stack.size() - count + at];
      if (!one.isTensor() || !fits(expected.get(), static_cast<Py_ssize_t>(at), one.toTensor())) {
        return false;
      }
    }
    go_on(policy, expected.get());
    return true;
  }

  // `Recorder._run_special`.
  void run_special(const c10::OperatorHandle& op, Recording& operation, Stack* stack) const {
    remove_dead(operation.session);
    Ref state = random_state(operation);
    bool updates = false;
    if (has_scratch_) {
      updates = call(known.in_training, operation.args).get() == Py_True;
      if (updates) {
        Ref statistics = call(known.running_statistics, info_, operation.args);
        call_method(operation.table(), known.forget_before_write, statistics.get());
      }
    }
    run(op, stack);
    Ref out = returned(*stack);
    operation.out = out.get();
    Decided decided = decide(operation, nullptr);
    if (!decided.all_kept) {
      Ref args = Ref::borrow(operation.args), replayed;
      Recording as_replayed = operation;
      as_replayed.random_state = state.get();
      if (updates) {
        Ref replaced = call(known.with_scratch, info_, operation.args);
        args = owned(PySequence_Tuple(replaced.get()));
        as_replayed.args = args.get();
      }
      if (is_replaced_) {
        replayed = call(known.as_replayed, info_, args.get(), operation.keywords(), out.get());
        if (!PyTuple_Check(replayed.get()) || PyTuple_GET_SIZE(replayed.get()) != 3) {
          PyErr_SetString(PyExc_TypeError, "an operation as it is replayed is no tuple of three");
          raise();
        }
        args = owned(PySequence_Tuple(PyTuple_GET_ITEM(replayed.get(), 1)));
        as_replayed.info = PyTuple_GET_ITEM(replayed.get(), 0);
        as_replayed.args = args.get();
        PyObject* kwargs = PyTuple_GET_ITEM(replayed.get(), 2);
        as_replayed.kwargs = PyDict_GET_SIZE(kwargs) ? kwargs : nullptr;
      }
      as_replayed.record(decided.choices.get(), decided.results.get());
    }
    if (decided.is_last) begin_rest(operation.session);
  }

  // The recorder that hears this operation, if it is one that this core records: as
  // `_torch_listen._heard` and the beginning of `Recorder._observe`.
  template <typename Iterator>
  Ref usual_session(Iterator first, Iterator last) {
    if (!connected || path() == Path::kPython || c10::impl::TorchDispatchModeTLS::stack_len() != 0 ||
        c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python) ||
        torch::autograd::get_current_graph_task_id() != -1) {
      return Ref();
    }
    for (Iterator at = first; at != last; ++at) {
      if (!is_plain(*at)) return Ref();
    }
    Ref link = owned(PyObject_GetAttr(known.thread, known.innermost));
    if (link.get() == Py_None || known.outer.in(link.get()) != Py_None) return Ref();
    Ref session = Ref::borrow(known.session.in(link.get()));
    if (session.get() == Py_None) return Ref();
    Ref copying = owned(PyObject_GetAttr(part(session.get(), kSavedTensors), known.copying));
    return copying.get() == Py_False ? std::move(session) : Ref();
  }

  Path path() {
    if (path_ == Path::kUnknown) {
      Ref info = call(known.info_of, overload_);
      auto is = [&](const char* name) {
        Ref content = owned(PyObject_GetAttrString(info.get(), name));
        const int is_true = PyObject_IsTrue(content.get());
        check(is_true);
        return is_true == 1;
      };
      is_random_ = is("random");
      reads_written_ = is("reads_written");
      has_scratch_ = is("scratch");
      is_replaced_ = is("dtype") || is("shape_only");
      const bool is_usual = is("recordable") && !is("view") && !is("collective") && !is("chunks");
      Path found = Path::kPython;
      if (is("simple")) {
        found = Path::kSimple;
      } else if (is("view")) {
        found = Path::kView;
      } else if (is_usual && !is("writes")) {
        found = Path::kSpecial;
      } else if (is_usual && is("writes_self") && !has_scratch_ && !is("counts_first")) {
        found = Path::kMethod;
      }
      info_ = info.release();
      path_ = found;
    }
    return path_;
  }

  static bool is_default(const Described& described, const IValue& argument) {
    return described.default_value.has_value() && *described.default_value == argument;
  }

  static Ref as_object(const Described& described, const IValue& argument) {
    if (argument.isNone()) return Ref::borrow(Py_None);
    if (argument.isTensor()) return owned(THPVariable_Wrap(argument.toTensor()));
    switch (described.kind) {
      case Kind::kDtype:
        return Ref::borrow(reinterpret_cast<PyObject*>(
            torch::getTHPDtype(static_cast<c10::ScalarType>(argument.toInt()))));
      case Kind::kLayout:
        return Ref::borrow(
            reinterpret_cast<PyObject*>(torch::getTHPLayout(argument.toLayout())));
      case Kind::kMemoryFormat:
        return Ref::borrow(torch::utils::getTHPMemoryFormat(
            static_cast<c10::MemoryFormat>(argument.toInt())));
      case Kind::kOther: break;
    }
    return Ref(torch::jit::toPyObject(argument).release().ptr());
  }

  // Arguments as torch gives them to a kernel that is written in Python: those at the end that have
  // their default value are left out (`parseIValuesToPyArgsKwargs` in
  // torch/csrc/autograd/python_variable.cpp).
  void convert(const std::vector<IValue>& arguments, Ref& args, Ref& kwargs) const {
    size_t keywords = arguments.size();
    while (keywords > 0 && arguments_[keywords - 1].is_keyword) --keywords;
    size_t given = keywords;
    while (given > 0 && is_default(arguments_[given - 1], arguments[given - 1])) --given;
    args = owned(PyTuple_New(static_cast<Py_ssize_t>(given)));
    for (size_t at = 0; at < given; ++at) {
      PyTuple_SET_ITEM(args.get(), static_cast<Py_ssize_t>(at),
                       as_object(arguments_[at], arguments[at]).release());
    }
    for (size_t at = keywords; at < arguments.size(); ++at) {
      if (is_default(arguments_[at], arguments[at])) continue;
      if (!kwargs) kwargs = owned(PyDict_New());
      Ref content = as_object(arguments_[at], arguments[at]);
      check(PyDict_SetItem(kwargs.get(), arguments_[at].name, content.get()));
    }
  }

  static Ref as_object(const IValue& content) {
    if (content.isTensor()) return owned(THPVariable_Wrap(content.toTensor()));
    return Ref(torch::jit::toPyObject(content).release().ptr());
  }

  // What the operator has returned, as Python sees it.
  Ref returned(const Stack& stack) const {
    const size_t count = returns_.size();
    if (count == 0) return Ref::borrow(Py_None);
    if (count == 1) return as_object(stack.back());
    Ref all = owned(PyTuple_New(static_cast<Py_ssize_t>(count)));
    for (size_t at = 0; at < count; ++at) {
      PyTuple_SET_ITEM(all.get(), static_cast<Py_ssize_t>(at),
                       as_object(stack[stack.size() - count + at]).release());
    }
    return all;
  }

  // What torch does for a kernel that is written in Python (`PythonKernelHolder` in
  // torch/csrc/utils/python_dispatch.cpp).
  void ask_python(PyObject* args, PyObject* kwargs, Stack* stack) const {
    Ref out = owned(PyObject_Call(heard_, args, kwargs));
    if (returns_.empty()) {
      TORCH_CHECK(out.get() == Py_None, "an operator that returns nothing has returned something");
    } else if (returns_.size() == 1) {
      torch::jit::push(*stack, torch::jit::toIValue(out.get(), returns_[0]));
    } else {
      Ref all = owned(PySequence_Tuple(out.get()));
      TORCH_CHECK(static_cast<size_t>(PyTuple_GET_SIZE(all.get())) == returns_.size(),
                  "an operator has returned another number of results than its schema says");
      for (size_t at = 0; at < returns_.size(); ++at) {
        PyObject* one = PyTuple_GET_ITEM(all.get(), static_cast<Py_ssize_t>(at));
        torch::jit::push(*stack, torch::jit::toIValue(one, returns_[at]));
      }
    }
  }

  PyObject* overload_;
  PyObject* heard_;
  PyObject* info_ = nullptr;
  Path path_ = Path::kUnknown;
  bool is_random_ = false;
  bool reads_written_ = false;
  bool has_scratch_ = false;
  bool is_replaced_ = false;
  std::vector<Described> arguments_;
  std::vector<c10::TypePtr> returns_;
};

// ---------------------------------------------------------------------------------- saved tensors

// `_pack_root` in saved_tensors.py.
Ref pack_root(PyObject* saved_tensors, PyObject* table, PyObject* object, const at::Tensor& tensor) {
  Ref version = number(version_of(tensor));
  if (tensor.is_view()) {
    const at::Tensor base(tensor._base());
    if (is_leaf_with_gradient(base)) return owned(PyTuple_Pack(2, object, version.get()));
  }
  Ref segment = owned(PyObject_GetAttr(table, known.name_segment));
  if (known.scope.in(segment.get()) != Py_None) {
    return call_method(saved_tensors, known.pack_root, object);
  }
  Ref alias = alias_of(tensor);
  Ref itself = tensor.requires_grad() ? Ref::borrow(Py_None) : weak(object);
  return owned(PyTuple_Pack(3, alias.get(), version.get(), itself.get()));
}

// `_itself` in saved_tensors.py: of a kept tensor with its version, and what was saved.
Ref unpack_itself(PyObject* packed) {
  PyObject* alias = PyTuple_GET_ITEM(packed, 0);
  if (PyTuple_GET_SIZE(packed) < 3 || PyTuple_GET_ITEM(packed, 2) == Py_None) {
    return Ref::borrow(alias);
  }
  Ref saved = alive(PyTuple_GET_ITEM(packed, 2));
  if (!THPVariable_Check(saved.get())) return Ref::borrow(alias);
  const at::Tensor &a = tensor_in(saved.get()), &b = tensor_in(alias);
  const bool has_moved = a.requires_grad() || !is_plain(a) || !a.storage().is_alias_of(b.storage()) ||
      a.sizes() != b.sizes() || a.strides() != b.strides() ||
      a.storage_offset() != b.storage_offset() || a.scalar_type() != b.scalar_type();
  return has_moved ? Ref::borrow(alias) : std::move(saved);
}

// `PlanFollower.before_save`, of a plain tensor; false where Python has to be asked.
bool is_counted(PyObject* observer, const at::Tensor& tensor) {
  if (!PyObject_TypeCheck(observer, known.following)) return false;
  if (known.in_rest.in(observer) != Py_True) return true;
  const int64_t saves = number_in(known.saves.in(observer)) + 1;
  const int64_t bytes =
      number_in(known.saved_bytes.in(observer)) + static_cast<int64_t>(tensor.nbytes());
  if (saves > number_in(known.most_saves.in(observer)) ||
      bytes > number_in(known.most_bytes.in(observer))) {
    return false;
  }
  known.saves.set(observer, number(saves));
  known.saved_bytes.set(observer, number(bytes));
  return true;
}

Ref pack_plain(PyObject* session, PyObject* object, const at::Tensor& tensor);

// `SavedTensors.pack`.
Ref pack_tensor(PyObject* session, PyObject* object) {
  PyObject* saved_tensors = part(session, kSavedTensors);
  if (!enabled || !THPVariable_Check(object) || !is_plain(tensor_in(object)) ||
      (reinterpret_cast<PyObject*>(Py_TYPE(object)) != known.tensor &&
       !is_leaf_with_gradient(tensor_in(object)))) {
    return call_method(saved_tensors, known.pack, object);
  }
  const at::Tensor& tensor = tensor_in(object);
  Ref observer = owned(PyObject_GetAttr(saved_tensors, known.observer));
  if (observer.get() == Py_None) return pack_plain(session, object, tensor);
  if (!is_counted(observer.get(), tensor)) return call_method(saved_tensors, known.pack, object);
  Ref packed = pack_plain(session, object, tensor);
  if (known.handle.is_type_of(packed.get()) && known.in_rest.in(observer.get()) == Py_True) {
    known.last_rebuilt.set(observer.get(), Ref::borrow(known.saves.in(observer.get())));
  }
  return packed;
}

// The same for a parameter or a tensor of torch's own class.
Ref pack_plain(PyObject* session, PyObject* object, const at::Tensor& tensor) {
  PyObject* saved_tensors = part(session, kSavedTensors);
  remove_dead(session);
  if (is_leaf_with_gradient(tensor)) {
    Ref version = number(version_of(tensor));
    return owned(PyTuple_Pack(2, object, version.get()));
  }
  PyObject* table = part(session, kTable);
  Ref key = key_of(tensor);
  Ref value = Ref::borrow(PyDict_GetItemWithError(part(session, kValues), key.get()));
  if (!value) {
    if (PyErr_Occurred()) raise();
    return pack_root(saved_tensors, table, object, tensor);
  }
  const bool is_written = number_in(known.version.in(value.get())) != version_of(tensor) ||
      number_in(known.position.in(value.get())) < 0 ||
      known.write_pending.in(value.get()) != Py_False ||
      known.unwritten.in(value.get()) != Py_None;
  if (is_written) {  // `SavedTensors._pack_written`
    PyObject* op = known.op.in(value.get());
    if (tensor.is_view() || op == Py_None || known.slices.in(op) != Py_False ||
        !is_present(session, value.get(), version_of(tensor))) {
      return call_method(saved_tensors, known.pack_written, value.get(), object);
    }
  }
  if (tensor.is_view() && is_leaf_with_gradient(at::Tensor(tensor._base()))) {
    return pack_root(saved_tensors, table, object, tensor);
  }
  const bool is_whole = lies_at(tensor, known.geometry.in(value.get()));
  Ref geometry = is_whole ? Ref::borrow(Py_None) : geometry_of(tensor);
  Ref handle = known.handle.make();
  known.handle_tape.set(handle.get(), Ref::borrow(part(session, kTape)));
  known.handle_value.set(handle.get(), Ref::borrow(value.get()));
  known.handle_geometry.set(handle.get(), Ref::borrow(geometry.get()));
  Ref handles = Ref::borrow(known.handles.in(value.get()));
  known.handles.set(value.get(), with_another(handles.get(), weak(handle.get())));
  if (handles.get() != Py_None) return handle;
  if (known.evictable.in(value.get()) == Py_True) {
    if (!is_whole || known.on_held.in(part(session, kTape)) != Py_None) {
      call_method(saved_tensors, known.hold_evictable, value.get(), object, geometry.get());
    } else {
      known.tensor_held.set(value.get(), alias_of(tensor));
      known.held_version.set(value.get(), number(version_of(tensor)));
    }
    return handle;
  }
  Ref segment = owned(PyObject_GetAttr(table, known.name_segment));
  Ref scope = Ref::borrow(known.scope.in(segment.get()));
  if (scope.get() != Py_None && is_written) {
    call_method(saved_tensors, known.count_freed, value.get(), object);
  } else if (scope.get() != Py_None) {
    Ref size = number(static_cast<int64_t>(tensor.storage().nbytes()));
    call_method(scope.get(), known.note_freed, value.get(), size.get());
  }
  return handle;
}

// The counter of `Unrecorded` in follow_plan.py.
struct SavedBytes {
  int64_t bytes;
  double limit;
};

// `Unrecorded._pack`: what is not usual, or above the limit, goes `otherwise`.
Ref pack_counted(PyObject* counter, PyObject* otherwise, PyObject* object) {
  if (!enabled || !THPVariable_CheckExact(object)) return call(otherwise, object);
  const at::Tensor& tensor = tensor_in(object);
  if (!is_plain(tensor)) return call(otherwise, object);
  auto* saved = reinterpret_cast<SavedBytes*>(PyByteArray_AS_STRING(counter));
  const int64_t bytes = saved->bytes + static_cast<int64_t>(tensor.nbytes());
  if (static_cast<double>(bytes) > saved->limit) return call(otherwise, object);
  saved->bytes = bytes;
  Ref version = number(version_of(tensor));
  if (tensor.is_leaf()) return owned(PyTuple_Pack(2, object, version.get()));
  Ref alias = alias_of(tensor);  // its graph would hold itself
  return owned(PyTuple_Pack(2, alias.get(), version.get()));
}

// ------------------------------------------------------------------------ the copy to go back to

// The bytes of some tensors, one after the other: where they lie, and where each begins in all.
struct Bytes {
  std::vector<const char*> from;
  std::vector<int64_t> begins{0};

  // False if they are not dense numbers of one type on the CPU.
  bool take(const at::Tensor& tensor, at::ScalarType type) {
    if (!is_plain(tensor) || !tensor.is_cpu() || tensor.scalar_type() != type ||
        !tensor.is_contiguous()) {
      return false;
    }
    from.push_back(static_cast<const char*>(tensor.const_data_ptr()));
    begins.push_back(begins.back() + static_cast<int64_t>(tensor.nbytes()));
    return true;
  }

  // Copies those between two places of all of them.
  void copy(char* to, int64_t begin, int64_t end) const {
    auto which = std::upper_bound(begins.begin(), begins.end(), begin) - begins.begin() - 1;
    while (begin < end) {
      const int64_t stop = std::min(end, begins[which + 1]);
      std::memcpy(to + begin, from[which] + (begin - begins[which]), stop - begin);
      begin = stop;
      ++which;
    }
  }
};

constexpr int64_t kBytesOfAThread = 1 << 20;  // fewer take longer to hand over

// `flat_copy` in _torch.py; None where that has to do it.
Ref copied(PyObject* tensors) {
  if (!enabled || !PyList_CheckExact(tensors) || PyList_GET_SIZE(tensors) == 0) {
    return Ref::borrow(Py_None);
  }
  Bytes bytes;
  at::ScalarType type = at::ScalarType::Undefined;
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(tensors); ++at) {
    PyObject* object = PyList_GET_ITEM(tensors, at);
    if (!THPVariable_Check(object)) return Ref::borrow(Py_None);
    const at::Tensor& tensor = tensor_in(object);
    if (at == 0) type = tensor.scalar_type();
    if (!bytes.take(tensor, type)) return Ref::borrow(Py_None);
  }
  const int64_t count = bytes.begins.back() / static_cast<int64_t>(c10::elementSize(type));
  const at::Tensor flat = at::empty({count}, at::TensorOptions(type).device(at::kCPU));
  if (!is_plain(flat)) return Ref::borrow(Py_None);  // somebody's mode has made it
  char* to = static_cast<char*>(flat.mutable_data_ptr());
  {
    pybind11::gil_scoped_release while_it_runs;
    at::parallel_for(0, bytes.begins.back(), kBytesOfAThread,
                     [&](int64_t begin, int64_t end) { bytes.copy(to, begin, end); });
  }
  return owned(THPVariable_Wrap(flat));
}

// The norm of each of some gradients, as numbers; None where `_norm` in scaling.py has to do it.
Ref norms_of(PyObject* gradients) {
  if (!enabled || !PyList_CheckExact(gradients) || PyList_GET_SIZE(gradients) == 0) {
    return Ref::borrow(Py_None);
  }
  std::vector<at::Tensor> tensors;
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(gradients); ++at) {
    PyObject* object = PyList_GET_ITEM(gradients, at);
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != THPVariableClass) {
      return Ref::borrow(Py_None);
    }
    const at::Tensor& tensor = tensor_in(object);
    const at::ScalarType type = tensor.scalar_type();
    if (!is_plain(tensor) || !tensor.is_cpu() || (type != at::kFloat && type != at::kDouble)) {
      return Ref::borrow(Py_None);
    }
    tensors.push_back(tensor);
  }
  std::vector<double> numbers;
  {
    pybind11::gil_scoped_release while_it_runs;
    for (const at::Tensor& norm : at::_foreach_norm(tensors, 2.0)) {
      numbers.push_back(norm.item<double>());
    }
  }
  Ref all = owned(PyList_New(static_cast<Py_ssize_t>(numbers.size())));
  for (size_t at = 0; at < numbers.size(); ++at) {
    PyList_SET_ITEM(all.get(), static_cast<Py_ssize_t>(at),
                    owned(PyFloat_FromDouble(numbers[at])).release());
  }
  return all;
}

// ----------------------------------------------------------------------------------- Python module

// Runs a function of this core for Python: its exceptions become Python's.
template <typename Function>
PyObject* for_python(Function function) {
  try {
    return function().release();
  } catch (python_error& error) {
    error.restore();
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* pack(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 2 || !connected || !PyTuple_CheckExact(given[0]) ||
      PyTuple_GET_SIZE(given[0]) != kSessionSize) {
    PyErr_SetString(PyExc_TypeError, "pack takes a session and a tensor");
    return nullptr;
  }
  return for_python([&] { return pack_tensor(given[0], given[1]); });
}

PyObject* pack_kept(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 3 || !PyByteArray_CheckExact(given[0]) ||
      PyByteArray_GET_SIZE(given[0]) != sizeof(SavedBytes)) {
    PyErr_SetString(PyExc_TypeError, "pack_kept takes a counter, a function and a tensor");
    return nullptr;
  }
  return for_python([&] { return pack_counted(given[0], given[1], given[2]); });
}

// `unpack` in saved_tensors.py.
PyObject* unpack(PyObject*, PyObject* packed) {
  return for_python([&] {
    if (PyTuple_CheckExact(packed) && PyTuple_GET_SIZE(packed) >= 2) {
      PyObject* tensor = PyTuple_GET_ITEM(packed, 0);
      PyObject* version = PyTuple_GET_ITEM(packed, 1);
      if (THPVariable_Check(tensor) && PyLong_CheckExact(version) && is_plain(tensor_in(tensor)) &&
          number_in(version) == version_of(tensor_in(tensor))) {
        return unpack_itself(packed);
      }
    }
    return call(known.unpack, packed);
  });
}

PyObject* flat_copy(PyObject*, PyObject* tensors) {
  return for_python([&] { return copied(tensors); });
}

PyObject* norms(PyObject*, PyObject* gradients) {
  return for_python([&] { return norms_of(gradients); });
}

PyMethodDef functions[] = {
    {"pack", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&pack)), METH_FASTCALL,
     "What autograd keeps in the place of a tensor."},
    {"pack_kept", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&pack_kept)),
     METH_FASTCALL, "The tensor, with its version, and its bytes counted."},
    {"unpack", &unpack, METH_O, "The tensor that autograd wants back."},
    {"norms", &norms, METH_O, "The norm of each gradient, as a number."},
    {"flat_copy", &flat_copy, METH_O, "What is in some tensors, in one piece of memory."},
    {nullptr, nullptr, 0, nullptr},
};

std::unordered_map<std::string, std::unique_ptr<torch::Library>> libraries;  // by namespace

void listen(const std::string& name, const std::string& overload_name, pybind11::object overload,
            pybind11::object heard) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(),
                                                                 overload_name.c_str());
  auto& library = libraries[name.substr(0, name.find("::"))];  // which live as long as the process
  if (library == nullptr) {
    library = std::make_unique<torch::Library>(torch::Library::IMPL, name.substr(0, name.find("::")),
                                               listening_key, "gradfit", 0);
  }
  const std::string full = overload_name.empty() ? name : name + "." + overload_name;
  library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(
      std::make_unique<Listening>(op.schema(), overload.ptr(), heard.ptr())));
}

void connect(const pybind11::dict& given) {
  auto take = [&](const char* name) {
    pybind11::object object = given[name];
    return object.release().ptr();  // for ever
  };
  auto intern = [](const char* name) { return owned(PyUnicode_InternFromString(name)).release(); };
  Known k;
  k.thread = take("thread");
  k.parameter = take("Parameter");
  k.tensor = take("Tensor");
  k.life = take("Life");
  k.watch_type = take("StorageWatch");
  k.watch_storage = take("watch_storage");
  k.atoms = take("ATOMS");
  k.no_kwargs = take("NO_KWARGS");
  k.next_index = take("next_index");
  k.info_of = take("info_of");
  k.results_of = take("results_of");
  k.each_once = take("each_once");
  k.untrackable = take("Untrackable");
  k.keep = take("KEEP");
  k.rebuild = take("REBUILD");
  k.hold = take("HOLD");
  k.nothing = take("nothing");
  k.scratch = take("Scratch");
  k.all = take("ALL");
  k.draws = take("draws");
  k.capture = take("capture");
  k.in_training = take("in_training");
  k.running_statistics = take("running_statistics");
  k.with_scratch = take("with_scratch");
  k.as_replayed = take("as_replayed");
  k.unpack = take("unpack");
  PyObject* value = take("TapeValue");
  PyObject* operation = take("TapeOperation");
  PyObject* slice = take("Slice");
  PyObject* read = take("ParameterRef");
  k.value = Layout(value, take("a_value"));
  k.operation = Layout(operation, take("an_operation"));
  k.slice = Layout(slice, take("a_slice"));
  k.read = Layout(read, take("a_read"));
  PyObject* handle = take("Handle");
  k.handle = Layout(handle, take("a_handle"));
  k.handle_tape = slot_of(handle, "tape");
  k.handle_value = slot_of(handle, "value");
  k.handle_geometry = slot_of(handle, "geometry");
  k.info_unwritten = slot_of(take("OpInfo"), "unwritten");
  k.scope = slot_of(take("Segment"), "scope");
  k.on_held = slot_of(take("Tape"), "on_held");
  k.tensor_held = slot_of(value, "tensor");
  k.held_version = slot_of(value, "held_version");
  k.handles = slot_of(value, "handles");
  k.written = slot_of(operation, "written");
  k.random_state = slot_of(operation, "random_state");
  k.slices = slot_of(operation, "slices");
  k.key = slot_of(value, "key");
  k.geometry = slot_of(value, "geometry");
  k.segment = slot_of(value, "segment");
  k.op = slot_of(value, "op");
  k.position = slot_of(value, "position");
  k.version = slot_of(value, "version");
  k.write_pending = slot_of(value, "write_pending");
  k.forward_tensor = slot_of(value, "forward_tensor");
  k.death_watch = slot_of(value, "death_watch");
  k.unwritten = slot_of(value, "unwritten");
  k.evictable = slot_of(value, "evictable");
  k.users = slot_of(value, "users");
  k.index = slot_of(operation, "index");
  k.func = slot_of(operation, "func");
  k.info = slot_of(operation, "info");
  k.args = slot_of(operation, "args");
  k.kwargs = slot_of(operation, "kwargs");
  k.inputs = slot_of(operation, "inputs");
  k.outputs = slot_of(operation, "outputs");
  k.slice_value = slot_of(slice, "value");
  k.slice_geometry = slot_of(slice, "geometry");
  k.read_content = slot_of(read, "content");
  k.read_source = slot_of(read, "source");
  k.read_version = slot_of(read, "version");
  PyObject* link = take("Link");
  k.outer = slot_of(link, "outer");
  k.session = slot_of(link, "session");
  k.policy = slot_of(take("Decisions"), "policy");
  k.watch_key = slot_of(k.watch_type, "key");
  PyObject* following = take("FollowingPolicy");
  k.following = reinterpret_cast<PyTypeObject*>(following);
  k.expected = slot_of(following, "expected");
  k.next_operation = slot_of(following, "operation");
  k.next_value = slot_of(following, "value");
  k.segments = slot_of(following, "segments");
  k.in_rest = slot_of(following, "in_rest");
  k.saves = slot_of(following, "saves");
  k.saved_bytes = slot_of(following, "saved_bytes");
  k.last_rebuilt = slot_of(following, "last_rebuilt");
  k.most_saves = slot_of(following, "most_saves");
  k.most_bytes = slot_of(following, "most_bytes");
  k.innermost = intern("innermost");
  k.copying = intern("copying");
  k.decide = intern("decide");
  k.remove_dead = intern("remove_dead");
  k.refer = intern("refer");
  k.refer_all = intern("refer_all");
  k.refer_kwargs = intern("refer_kwargs");
  k.root = intern("root");
  k.record = intern("_record");
  k.begin_rest = intern("_begin_rest");
  k.add_result = intern("add_result");
  k.name_segment = intern("segment");
  k.name_recorded = intern("_recorded");
  k.widens = intern("_widens_segments");
  k.common = intern("common");
  k.copy_value = intern("copy_value");
  k.move_out_written = intern("move_out_written");
  k.forget_before_write = intern("forget_before_write");
  k.observer = intern("observer");
  k.pack = intern("pack");
  k.pack_root = intern("_pack_root");
  k.pack_written = intern("_pack_written");
  k.hold_evictable = intern("_hold_evictable");
  k.note_freed = intern("note_freed");
  k.count_freed = intern("_count_freed");
  TORCH_CHECK(pybind11::cast<Py_ssize_t>(given["session_size"]) == kSessionSize,
              "a session has another size than this core was built for");
  TORCH_CHECK(pybind11::cast<Py_ssize_t>(given["expected_size"]) == kExpectedSize,
              "an expected operation has another size than this core was built for");
  known = k;
  connected = true;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("use_key", [](const std::string& name) { listening_key = c10::parseDispatchKey(name); });
  m.def("listen", &listen);
  m.def("connect", &connect);
  m.def("enable", [](bool on) { enabled = on; });
  m.def("is_enabled", [] { return enabled; });
  if (PyModule_AddFunctions(m.ptr(), functions) < 0 || !add_state_functions(m.ptr())) {
    throw pybind11::error_already_set();
  }
}
