// A simulated accelerator for the tests, stricter than a real one: see streams.h and memory.h.
//
// Everything that is not memory or streams is computed by the CPU's own kernels, on CPU tensors that share the device's
// memory (through its open mapping): the boxed fallback at the end. So results are those of the CPU, bit by bit.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "memory.h"
#include "streams.h"

namespace sim {

constexpr auto kType = c10::DeviceType::PrivateUse1;
using at::Tensor;
using torch::jit::Stack;

DeviceMemory& memory(int index) {
  static auto* all = new std::vector<std::unique_ptr<DeviceMemory>>;
  static bool once = [] {
    for (int i = 0; i < kDevices; ++i) all->push_back(std::make_unique<DeviceMemory>(i));
    return true;
  }();
  (void)once;
  return *(*all)[index];
}

int device_of(const void* p) {
  for (int i = 0; i < kDevices; ++i)
    if (memory(i).space.contains(p)) return i;
  return -1;
}

// ---- the allocators --------------------------------------------------------------------------------------------------

struct SimAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    int device = current_device();
    c10::Device where(kType, device);
    if (bytes == 0) return {nullptr, nullptr, &release, where};
    void* p = memory(device).allocate(bytes)->ptr;
    return {p, p, &release, where};
  }
  static void release(void* p) {
    if (p) memory(device_of(p)).release(p);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override {
    int device = device_of(to);
    current_stream(device).drain();
    std::memcpy(memory(device).space.for_kernels(to), memory(device_of(from)).space.for_kernels(from), count);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (int i = 0; i < kDevices; ++i) memory(i).empty_cache();
  }
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    if (ptr.get()) memory(ptr.device().index()).used_on(ptr.get_context(), stream.id());
  }
  Stats getDeviceStats(c10::DeviceIndex device) override { return memory(device).stats(); }
  void resetAccumulatedStats(c10::DeviceIndex device) override { memory(device).reset_accumulated(); }
  void resetPeakStats(c10::DeviceIndex device) override { memory(device).reset_peaks(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    size_t total = memory(device).settings.total_bytes;
    return {total - std::min(total, memory(device).reserved()), total};
  }
};
SimAllocator* allocator() {
  static auto* one = new SimAllocator;
  return one;
}
REGISTER_ALLOCATOR(kType, allocator());

// Host memory that copies may read and write late. A copy on its way keeps it (and nothing else does, as on CUDA).
struct Pinned final : c10::Allocator {
  struct Block {
    size_t size;
    int users;
  };
  std::mutex mutex;
  std::map<char*, Block> blocks;

  c10::DataPtr allocate(size_t bytes) override {
    char* p = new char[std::max<size_t>(bytes, 1)];
    std::memset(p, 0xFF, bytes);
    std::lock_guard<std::mutex> lock(mutex);
    blocks[p] = {bytes, 1};
    return {p, p, &release, c10::Device(c10::kCPU)};
  }
  char* block_of(const void* p) {  // with the lock held
    auto it = blocks.upper_bound(static_cast<char*>(const_cast<void*>(p)));
    if (it == blocks.begin()) return nullptr;
    --it;
    return p < it->first + std::max<size_t>(it->second.size, 1) ? it->first : nullptr;
  }
  bool contains(const void* p) {
    std::lock_guard<std::mutex> lock(mutex);
    return block_of(p) != nullptr;
  }
  void hold(const void* p) {
    std::lock_guard<std::mutex> lock(mutex);
    ++blocks.at(block_of(p)).users;
  }
  void let_go(const void* p) {
    std::lock_guard<std::mutex> lock(mutex);
    char* start = block_of(p);
    if (--blocks.at(start).users) return;
    blocks.erase(start);
    delete[] start;
  }
  static Pinned& one() {
    static auto* pinned = new Pinned;
    return *pinned;
  }
  static void release(void* p) { one().let_go(p); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

// ---- devices, streams, events ----------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using S = c10::Stream;
  static S stream(int device, int64_t id) { return S(S::UNSAFE, Device(kType, device), id); }
  static Stream& of(const S& s) { return stream_of(s.device_index(), s.id()); }

  c10::DeviceType type() const override { return kType; }
  Device exchangeDevice(Device d) const override {
    Device before = getDevice();
    setDevice(d);
    return before;
  }
  Device getDevice() const override { return Device(kType, current_device()); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < kDevices, "there are ", kDevices, " simulated devices, no device ", int(d.index()));
    if (d.index() >= 0) current_device() = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current_device() = d.index();
  }
  S getStream(Device d) const override {
    int index = d.index() < 0 ? current_device() : d.index();
    return stream(index, current_stream_id(index));
  }
  S getDefaultStream(Device d) const override { return stream(d.index() < 0 ? current_device() : d.index(), 0); }
  S getNewStream(Device d, int = 0) const override {
    static std::atomic<int64_t> next{0};
    return stream(d.index() < 0 ? current_device() : d.index(), 1 + next++ % (kStreams - 1));
  }
  S getStreamFromGlobalPool(Device d, bool = false) const override { return getNewStream(d); }
  S exchangeStream(S s) const override {
    S before = getStream(s.device());
    current_stream_id(s.device_index()) = s.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  using EventPtr = std::shared_ptr<Event>;
  static EventPtr& event(void* e) { return *static_cast<EventPtr*>(e); }
  void record(void** e, const S& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*e) *e = new EventPtr;
    event(*e) = of(s).record();
  }
  void block(void* e, const S& s) const override {
    if (e) of(s).wait_for(event(e));
  }
  bool queryEvent(void* e) const override { return !e || event(e)->happened(); }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override {
    if (e) delete static_cast<EventPtr*>(e);
  }
  void synchronizeEvent(void* e) const override {
    ++counters().waits;
    if (e) event(e)->synchronize();
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return (event(b)->wait_marked() - event(a)->wait_marked()) / 1e6;
  }
  bool queryStream(const S& s) const override { return of(s).idle(); }
  void synchronizeStream(const S& s) const override {
    ++counters().waits;
    of(s).synchronize();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    ++counters().waits;
    int index = device < 0 ? current_device() : device;
    for (int64_t id = 0; id < kStreams; ++id) stream_of(index, id).synchronize();
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const S& s) const override { allocator()->recordStream(ptr, s); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- generators: one of the CPU's behind each --------------------------------------------------------------------------

struct SimGenerator final : c10::GeneratorImpl {
  explicit SimGenerator(int device, at::Generator inner = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(inner)) {}
  at::Generator inner;

  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the simulated device's generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "the simulated device's generators have no offset"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return at::Generator(inner).seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  SimGenerator* clone_impl() const override {
    return new SimGenerator(device().index(), inner.clone());
  }
};
at::Generator& default_generator(int device) {
  static auto* all = new std::vector<at::Generator>{at::make_generator<SimGenerator>(0), at::make_generator<SimGenerator>(1)};
  return all->at(device < 0 ? current_device() : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex d) const override { Guard().setDevice({kType, d}); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return Guard().exchangeDevice({kType, d}).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return at::make_generator<SimGenerator>(d < 0 ? current_device() : d);
  }
  at::Device getDeviceFromPtr(void* p) const override { return {kType, static_cast<c10::DeviceIndex>(device_of(p))}; }
  bool isPinnedPtr(const void* p) const override { return Pinned::one().contains(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &Pinned::one(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override;
};
static bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// A storage of another size with the same content. In the order of the stream.
void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  c10::DeviceGuard guard(storage->device());
  c10::DataPtr to = allocator()->allocate(bytes);
  size_t count = std::min(bytes, storage->nbytes());
  if (count) allocator()->copy_data(to.mutable_get(), storage->data(), count);
  storage->set_data_ptr_noswap(std::move(to));
  storage->set_nbytes(bytes);
}
void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
  resize_storage(storage.unsafeGetStorageImpl(), bytes);
}

// ---- kernels: the CPU's, on tensors that share the device's memory ---------------------------------------------------------

bool is_sim(const Tensor& t) { return t.defined() && t.device().type() == kType; }

Tensor new_tensor(c10::Storage storage, caffe2::TypeMeta dtype, c10::DispatchKey key) {
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), dtype);
}
// With all its keys: a view of a tensor of inference mode is one, too.
Tensor view_of(const Tensor& base, caffe2::TypeMeta dtype) {
  return at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), dtype);
}
void give_geometry(const Tensor& to, const Tensor& from) {
  to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  to._set_conj(from.is_conj());
  to._set_neg(from.is_neg());
}

// One call of a kernel: stands in for each device tensor a CPU tensor on the same memory, and takes results back.
class Call {
 public:
  explicit Call(int device, bool is_kernel = true)
      : device_(device), stream_(current_stream(device)), lock_(stream_.running) {
    stream_.drain();
    if (!is_kernel) return;  // a view takes no time on a device
    stream_.spend();
    ++counters().kernels;
  }
  ~Call() { the_time().in_kernels += Time::processor() - begun_; }

  Tensor alias(const Tensor& t) {
    if (!is_sim(t)) return t;
    if (t.device().index() != device_) current_stream(t.device().index()).drain();
    Tensor a = new_tensor(alias(t.storage()), t.dtype(), c10::DispatchKey::CPU);
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) a.unsafeGetTensorImpl()->set_wrapped_number(true);
    give_geometry(a, t);
    tensors_.push_back({t, a});
    return a;
  }

  // What a kernel gave back, on the device: the tensor it was given, a view of one, or a new one.
  Tensor result(const Tensor& r) {
    if (!r.defined() || !r.device().is_cpu()) return r;
    for (auto& [original, a] : tensors_)
      if (a.is_same(r)) return original;
    for (auto& [original, a] : tensors_)
      if (a.storage().is_alias_of(r.storage()) && r.storage().nbytes()) return wrap(view_of(original, r.dtype()), r);
    return fresh(r);
  }

  // After the kernel: an `out=` may have been resized, and what was written appears late.
  void finish(const std::vector<Tensor>& written) {
    for (auto& [from, to] : storages_)
      if (to.data() != open(from) && to.nbytes()) adopt(from, to);
    for (auto& [original, a] : tensors_)
      if (original.sizes() != a.sizes() || original.strides() != a.strides()) give_geometry(original, a);
    for (auto& t : written) appear_late(t);
  }

 private:
  static void* open(const c10::Storage& s) {
    return s.data() ? memory(s.device().index()).space.for_kernels(s.data()) : nullptr;
  }

  c10::Storage alias(const c10::Storage& s) {
    for (auto& [from, to] : storages_)
      if (from.is_alias_of(s)) return to;
    c10::DataPtr data(open(s), c10::Device(c10::kCPU));
    c10::Storage to(c10::Storage::use_byte_size_t(), s.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
    storages_.push_back({s, to});
    return to;
  }

  // The kernel made the alias larger, in the host's memory: so the device's storage becomes larger.
  static void adopt(const c10::Storage& device, const c10::Storage& host) {
    resize_storage(device.unsafeGetStorageImpl(), host.nbytes());
    std::memcpy(open(device), host.data(), host.nbytes());
  }

  static Tensor wrap(const Tensor& t, const Tensor& like) {
    give_geometry(t, like);
    if (like.unsafeGetTensorImpl()->is_wrapped_number()) t.unsafeGetTensorImpl()->set_wrapped_number(true);
    return t;
  }

  Tensor fresh(const Tensor& r) {
    c10::DeviceGuard guard(c10::Device(kType, device_));
    size_t bytes = r.storage().nbytes();
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocator()->allocate(bytes), allocator(), true);
    if (bytes) {
      void* to = open(storage);
      if (delays().late()) stream_.later([keep = r.storage(), to, bytes] { std::memcpy(to, keep.data(), bytes); });
      else stream_.in_order([keep = r.storage(), to, bytes] { std::memcpy(to, keep.data(), bytes); });
    }
    return wrap(new_tensor(storage, r.dtype(), c10::DispatchKey::PrivateUse1), r);
  }

  // Hide what was just written, until the stream comes to it. Only where it fills its part of the memory.
  void appear_late(const Tensor& t) {
    if (!is_sim(t) || !t.numel() || !t.is_non_overlapping_and_dense() || !delays().late()) return;
    char* p = static_cast<char*>(memory(t.device().index()).space.for_kernels(t.storage().data()));
    p += t.storage_offset() * t.itemsize();
    auto content = std::make_shared<std::vector<char>>(p, p + t.nbytes());
    std::memset(p, 0xFF, t.nbytes());
    stream_.later([content, p] { std::memcpy(p, content->data(), content->size()); });
  }

  int64_t begun_ = Time::processor();
  int device_;
  Stream& stream_;
  std::unique_lock<std::recursive_mutex> lock_;
  std::vector<std::pair<Tensor, Tensor>> tensors_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
};

const SimGenerator& as_sim(const at::Generator& g) { return static_cast<SimGenerator&>(*g.unsafeGetGeneratorImpl()); }

// The device that a call is about: that of its first tensor with dimensions (a number may be on the CPU), or `device=`.
int find_device(const c10::FunctionSchema& schema, const Stack& stack, size_t begin) {
  int found = -1;
  auto look = [&](const Tensor& t) {
    if (found < 0 && is_sim(t)) found = t.device().index();
  };
  for (size_t i = begin; i < stack.size(); ++i) {
    const c10::IValue& v = stack[i];
    if (v.isTensor()) look(v.toTensor());
    else if (v.isTensorList()) for (const Tensor& t : v.toTensorVector()) look(t);
    else if (v.isOptionalTensorList()) for (const std::optional<Tensor>& t : v.toOptionalTensorVector()) { if (t) look(*t); }
    else if (v.isDevice() && v.toDevice().type() == kType && v.toDevice().index() >= 0) return v.toDevice().index();
  }
  return found < 0 ? current_device() : found;
}

// Run `op` on the CPU with the arguments that `schema` describes.
void run(const c10::OperatorHandle& op, const c10::FunctionSchema& schema, Stack* stack) {
  size_t begin = stack->size() - schema.arguments().size();
  int device = find_device(schema, *stack, begin);
  c10::DeviceGuard guard(c10::Device(kType, device));
  bool is_view = !schema.is_mutable() && !schema.returns().empty() && schema.returns()[0].alias_info();
  Call call(device, !is_view);
  std::vector<Tensor> written;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    c10::IValue& v = (*stack)[begin + i];
    const c10::Argument& argument = schema.arguments()[i];
    bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    if (v.isTensor()) {
      if (writes) written.push_back(v.toTensor());
      v = call.alias(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) {
        if (writes) written.push_back(t);
        list.push_back(call.alias(t));
      }
      v = list;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : v.toOptionalTensorVector()) list.push_back(t ? std::optional<Tensor>(call.alias(*t)) : t);
      v = list;
    } else if (v.isDevice() && v.toDevice().type() == kType) {
      v = c10::Device(c10::kCPU);
    } else if (v.isGenerator()) {
      if (v.toGenerator().device().type() == kType) v = as_sim(v.toGenerator()).inner;
    } else if (v.isNone() && argument.type()->kind() == c10::TypeKind::OptionalType &&
               argument.type()->castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType) {
      v = as_sim(default_generator(device)).inner;  // no generator: the device's own
    }
  }
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)) {
    ++counters().reads;
    current_stream(device).synchronize();
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.finish(written);
  for (size_t i = begin; i < stack->size(); ++i) {
    c10::IValue& v = (*stack)[i];
    if (v.isTensor()) {
      v = call.result(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(call.result(t));
      v = list;
    }
  }
}

void fallback(const c10::OperatorHandle& op, Stack* stack) { run(op, op.schema(), stack); }

// Operators on lists: as CUDA's own, they count what they write to, which torch does not do for them.
void list_fallback(const c10::OperatorHandle& op, Stack* stack) {
  std::vector<Tensor> written;
  if (op.schema().name().back() == '_')
    written = (*stack)[stack->size() - op.schema().arguments().size()].toTensorVector();
  run(op, op.schema(), stack);
  for (const Tensor& one : written)
    if (!one.is_inference()) one.unsafeGetTensorImpl()->bump_version();
}

c10::OperatorHandle find_op(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

// Convolution asks the device for its own; the CPU's takes the same arguments (backward: the bias' size, too).
void convolution(const c10::OperatorHandle&, Stack* stack) {
  static auto op = find_op("aten::convolution");
  run(op, op.schema(), stack);
}
void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  static auto op = find_op("aten::convolution_backward");
  Tensor gradient = (*stack)[stack->size() - 10].toTensor();
  stack->insert(stack->end() - 7, c10::IValue(std::vector<int64_t>{gradient.size(1)}));
  run(op, op.schema(), stack);
}

// ---- what the fallback cannot do ---------------------------------------------------------------------------------------

Tensor empty_memory_format(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

// Zeros that take no memory, as tangents in forward mode begin.
Tensor efficient_zeros(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  at::native::ZeroTensorAllocator none(c10::Device(kType, current_device()));
  c10::DispatchKeySet keys{c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor};
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &none, keys, c10::dtype_or_default(dtype), std::nullopt);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  auto* impl = self.unsafeGetTensorImpl();
  int64_t numel = c10::multiply_integers(size);
  size_t bytes = (impl->storage_offset() + numel) * self.itemsize();
  if (numel && bytes > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), bytes);
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.size() == sizes.size() && !sizes.empty()) impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  else {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset.expect_int());
  }
  return self;
}
Tensor& set_storage_whole(Tensor& self, at::Storage storage) {
  int64_t count = storage.nbytes() / self.itemsize();
  return set_storage(self, std::move(storage), 0, {c10::SymInt(count)}, {c10::SymInt(1)});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}
Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true);
  return set_storage(self, none, 0, {c10::SymInt(0)}, {c10::SymInt(1)});
}

bool plain_copy(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
      a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}
char* host_bytes(const Tensor& t) { return static_cast<char*>(t.data_ptr()); }
char* open_bytes(const Tensor& t) {
  return static_cast<char*>(memory(t.device().index()).space.for_kernels(t.storage().data())) +
      t.storage_offset() * t.itemsize();
}

// Between the device and pinned memory, without waiting: the stream reads and writes when it comes to it.
void copy_later(const Tensor& host, const Tensor& device, bool out) {
  Stream& stream = current_stream(device.device().index());
  char *h = host_bytes(host), *d = open_bytes(device);
  size_t bytes = device.nbytes();
  Pinned::one().hold(h);
  stream.spend();
  stream.later([=] {
    std::memcpy(out ? h : d, out ? d : h, bytes);
    Pinned::one().let_go(h);
  });
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0) return dst;
  Tensor from = self.sizes() == dst.sizes() ? self : self.expand(dst.sizes());
  bool out = is_sim(from) && !is_sim(dst), in = !is_sim(from) && is_sim(dst);
  if (out) ++counters().copies_out;
  if (in) ++counters().copies_in;
  const Tensor &host = out ? dst : from, &dev = out ? from : dst;
  if ((out || in) && non_blocking && plain_copy(from, dst) && Pinned::one().contains(host.data_ptr())) {
    copy_later(host, dev, out);
    return dst;
  }
  int device = dev.device().index();
  c10::DeviceGuard guard(dev.device());
  if (out) {
    ++counters().reads;
    current_stream(device).synchronize();
  }
  Call call(device);
  {
    c10::impl::ExcludeDispatchKeyGuard plain(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    call.alias(dst).copy_(call.alias(from));
  }
  if (!out) call.finish({dst});
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  if (self.sizes() != dst.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  ++counters().reads;
  c10::DeviceGuard guard(self.device());
  current_stream(self.device().index()).synchronize();
  Call call(self.device().index());
  return at::_local_scalar_dense(call.alias(self));
}

// The CPU's would draw from the CPU's generator; it takes none.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  double keep = 1 - p;
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(keep);
  return {input.mul(mask).mul_(keep == 0 ? 0.0 : 1 / keep), mask};
}

// Recurrent cells: every accelerator has fused ones and the CPU has none. Temporaries are the host's.
using Maybe = std::optional<Tensor>;

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const Maybe& input_bias, const Maybe& hidden_bias) {
  Call call(cx.device().index());
  Tensor gates = call.alias(input_gates) + call.alias(hidden_gates);
  if (input_bias && input_bias->defined()) gates = gates + call.alias(*input_bias) + call.alias(*hidden_bias);
  auto part = gates.chunk(4, 1);
  Tensor i = part[0].sigmoid(), f = part[1].sigmoid(), g = part[2].tanh(), o = part[3].sigmoid();
  Tensor cy = f * call.alias(cx) + i * g;
  return {call.result(o * cy.tanh()), call.result(cy), call.result(at::cat({i, f, g, o}, 1))};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const Maybe& grad_hy, const Maybe& grad_cy, const Tensor& cx, const Tensor& cy, const Tensor& workspace, bool has_bias) {
  Call call(cx.device().index());
  auto part = call.alias(workspace).chunk(4, 1);
  Tensor i = part[0], f = part[1], g = part[2], o = part[3], c = call.alias(cx), tanh = call.alias(cy).tanh();
  Tensor dh = grad_hy && grad_hy->defined() ? call.alias(*grad_hy) : at::zeros_like(c);
  Tensor dc = dh * o * (1 - tanh * tanh);
  if (grad_cy && grad_cy->defined()) dc = dc + call.alias(*grad_cy);
  Tensor gates = at::cat(
      {dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * tanh * o * (1 - o)}, 1);
  Tensor bias = has_bias ? gates.sum(0) : Tensor();
  return {call.result(gates), call.result(dc * f), call.result(bias)};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const Maybe& input_bias, const Maybe& hidden_bias) {
  Call call(hx.device().index());
  Tensor in = call.alias(input_gates), hidden = call.alias(hidden_gates), h = call.alias(hx);
  if (input_bias && input_bias->defined()) {
    in = in + call.alias(*input_bias);
    hidden = hidden + call.alias(*hidden_bias);
  }
  auto a = in.chunk(3, 1), b = hidden.chunk(3, 1);
  Tensor r = (a[0] + b[0]).sigmoid(), z = (a[1] + b[1]).sigmoid(), n = (a[2] + r * b[2]).tanh();
  return {call.result(n + z * (h - n)), call.result(at::cat({r, z, n, h, b[2]}, 1))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad, const Tensor& workspace, bool has_bias) {
  Call call(grad.device().index());
  auto part = call.alias(workspace).chunk(5, 1);
  Tensor d = call.alias(grad), r = part[0], z = part[1], n = part[2], h = part[3], hidden = part[4];
  Tensor dn = d * (1 - z) * (1 - n * n), dz = d * (h - n) * z * (1 - z), dr = dn * hidden * r * (1 - r);
  Tensor in = at::cat({dr, dz, dn}, 1), of_hidden = at::cat({dr, dz, dn * r}, 1);
  Tensor in_bias = has_bias ? in.sum(0) : Tensor(), hidden_bias = has_bias ? of_hidden.sum(0) : Tensor();
  return {call.result(in), call.result(of_hidden), call.result(d * z), call.result(in_bias), call.result(hidden_bias)};
}

bool compatible(const Tensor& self, const Tensor& from) {
  auto dense = [](const Tensor& t) {
    return t.layout() == at::kStrided && (t.device().is_cpu() || t.device().type() == kType) &&
        !t.key_set().has(c10::DispatchKey::Python) && !t.key_set().has(c10::DispatchKey::NestedTensor);
  };
  if (dense(self) && dense(from)) return true;  // as between the CPU and CUDA; else `module.to` would untie weights
  return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

void record_stream(Tensor& self, at::Stream stream) { allocator()->recordStream(self.storage().data_ptr(), stream); }

int64_t attention_choice(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

// Accelerators count whole numbers, too; the CPU does not.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  Call call(self.device().index());
  Tensor a = call.alias(self);
  bool whole = at::isIntegralType(a.scalar_type(), true);
  return call.result(at::histc(whole ? a.to(at::kDouble) : a, bins, min, max).to(a.scalar_type()));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", efficient_zeros);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_storage_whole);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("native_dropout", native_dropout);
  m.impl("histc", histc);
  // Without a kernel of the device's own torch calls `out=`, which warns here of a shape it has chosen itself.
  for (const char* name : {"mse_loss", "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // Lists of tensors are one kernel on an accelerator; torch's general way is one for each.
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames())
    if (op.name.rfind("aten::_foreach_", 0) == 0) {
      std::string name = op.name.substr(6) + (op.overload_name.empty() ? "" : "." + op.overload_name);
      m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&list_fallback>());
    }
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("_has_compatible_shallow_copy_type", compatible);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", attention_choice);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}
// Copies see to conjugates themselves; torch's general way of doing so is a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, CPU, m) { m.impl("_has_compatible_shallow_copy_type", compatible); }

// ---- autocast: torch's own lists -----------------------------------------------------------------------------------------

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_DTYPE)
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace sim

namespace at::native {
namespace {
int64_t sim_attention_choice(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}
}  // namespace
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim_attention_choice)
}  // namespace at::native

// ---- what Python sees: see simulated.py ------------------------------------------------------------------------------------

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  m.def("current_device", [] { return current_device(); });
  m.def("set_device", [](int d) { Guard().setDevice({kType, static_cast<c10::DeviceIndex>(d)}); });
  m.def("synchronize", [](int d) { Guard().synchronizeDevice(d); }, py::call_guard<py::gil_scoped_release>());
  m.def("default_generator", [](int d) { return default_generator(d); });
  m.def("counters", [] {
    auto& c = counters();
    return std::map<std::string, int64_t>{
        {"kernels", c.kernels}, {"reads", c.reads}, {"waits", c.waits}, {"copies_out", c.copies_out}, {"copies_in", c.copies_in}};
  });
  m.def("set_delays", [](uint64_t seed, double probability, int longest_us) {
    std::lock_guard<std::mutex> lock(delays().mutex);
    delays().random.seed(seed);
    delays().probability = probability;
    delays().longest_us = longest_us;
  });
  m.def("set_kernel_time", [](int us) {
    for (int d = 0; d < kDevices; ++d)
      for (int64_t id = 0; id < kStreams; ++id) stream_of(d, id).forget_time();
    the_time().kernel_us = us;
  });
  m.def("now", [] { return the_time().now() / 1e9; });
  m.def("set_cap", [](int d, size_t bytes) { memory(d).settings.cap_bytes = bytes; });
  m.def("cap", [](int d) { return std::min(memory(d).settings.cap_bytes, memory(d).settings.total_bytes); });
  m.def("set_total", [](int d, size_t bytes) { memory(d).settings.total_bytes = bytes; });
  m.def("total", [](int d) { return memory(d).settings.total_bytes; });
  m.def("set_expandable", [](bool on) {
    for (int d = 0; d < kDevices; ++d) memory(d).settings.expandable = on;
  });
  m.def("snapshot", [](int d) {
    py::list segments;
    for (auto& s : memory(d).snapshot()) {
      py::list blocks;
      for (auto& [size, used] : s.blocks)
        blocks.append(py::dict(py::arg("size") = size, py::arg("state") = used ? "active_allocated" : "inactive"));
      segments.append(py::dict(
          py::arg("device") = d, py::arg("address") = s.address, py::arg("total_size") = s.size,
          py::arg("segment_type") = s.small ? "small" : "large", py::arg("is_expandable") = s.expandable,
          py::arg("stream") = s.stream, py::arg("blocks") = blocks));
    }
    return segments;
  });
  m.def("set_poison", [](bool on) {
    for (int d = 0; d < kDevices; ++d) memory(d).settings.poison = on;
  });
  m.def("fail_allocation", [](int d, int64_t at, int64_t times) {
    memory(d).settings.fail_at = at;
    memory(d).settings.fail_times = times;
  });
  m.def("allocations", [](int d) { return memory(d).allocations(); });
  m.def("write_down_requests", [](int d, bool on) { return memory(d).write_down(on); });
}
