// A card for torch's CPU build: tensors on `cuda:0` whose bytes are the host's. Every op on them runs its CPU kernel on
// the same bytes, so that what a device is asked for, where tensors are, and what they take can be seen without one.
//
// Streams are as late as they may be. A copy that is issued with non_blocking on another stream than the default one
// runs when somebody waits for it: who reads its target before, or gives its memory back, gets what was there. As with
// CUDA, what is not page-locked is read at once, and written before the call returns. Any other op runs at once, behind
// all that its stream has to do.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;

const Device kCard{DeviceType::CUDA, 0};

// Memory.

constexpr size_t kBlock = 512;  // what the real allocator rounds to
std::atomic<int64_t> live{0}, peak{0}, limit{INT64_MAX};

int64_t rounded(size_t nbytes) { return int64_t((nbytes + kBlock - 1) / kBlock * kBlock); }

void charge(size_t nbytes) {
  const int64_t size = rounded(nbytes), now = live.fetch_add(size) + size;
  if (now > limit.load()) {
    live.fetch_sub(size);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size, " bytes.");
  }
  int64_t high = peak.load();
  while (now > high && !peak.compare_exchange_weak(high, now)) {
  }
}

struct Own {
  void* data;
  size_t nbytes;
};

struct CardAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, [](void*) {}, kCard};
    charge(nbytes);
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, kBlock, rounded(nbytes)) == 0, "the host has no memory for the card");
    return {data, new Own{data, nbytes}, &release, kCard};
  }
  static void release(void* context) {
    auto* own = static_cast<Own*>(context);
    live.fetch_sub(rounded(own->nbytes));
    std::free(own->data);
    delete own;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};
CardAllocator allocator;

// A CPU tensor over the bytes of a card's, which it keeps.
Tensor on_host(const Tensor& tensor) {
  const Storage& storage = tensor.storage();
  auto let_go = [](void* kept) { delete static_cast<Storage*>(kept); };
  c10::DataPtr data(storage.data_ptr().get(), new Storage(storage), let_go, Device(c10::kCPU));
  Storage host(Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, /*resizable=*/false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(host), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

// The card's storage of what a kernel has made on the host.
Storage to_card(const Storage& host) {
  charge(host.nbytes());
  auto let_go = [](void* context) {
    auto* kept = static_cast<Storage*>(context);
    live.fetch_sub(rounded(kept->nbytes()));
    delete kept;
  };
  c10::DataPtr data(const_cast<void*>(host.data()), new Storage(host), let_go, kCard);
  return Storage(Storage::use_byte_size_t(), host.nbytes(), std::move(data), &allocator, /*resizable=*/true);
}

// Streams. 0 is the default one, on which all runs at once.

struct Stream {
  std::deque<std::function<void()>> waiting;
  int64_t done = 0;  // of all that was ever put there
  int64_t put() const { return done + int64_t(waiting.size()); }
};

std::recursive_mutex streams_lock;
std::map<int64_t, Stream> streams;
thread_local int64_t current = 0;
std::atomic<int64_t> lost{0};

void catch_up(int64_t number, int64_t until) {
  std::lock_guard<std::recursive_mutex> hold(streams_lock);
  Stream& stream = streams[number];
  while (stream.done < until && !stream.waiting.empty()) {
    auto next = std::move(stream.waiting.front());
    stream.waiting.pop_front();
    stream.done++;
    next();
  }
}

void catch_up_own() {
  if (current != 0) catch_up(current, INT64_MAX);
}

using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

// A copy for later. Memory that is gone when it runs belongs to somebody else by then: it is not touched, and counted.
struct Later {
  Weak storage;
  void* at;
  explicit Later(const Tensor& tensor)
      : storage(tensor.storage().getWeakStorageImpl()), at(const_cast<void*>(tensor.const_data_ptr())) {}
  bool there() const { return bool(storage.lock()); }
};

bool is_flat(const Tensor& to, const Tensor& from) {
  return to.is_contiguous() && from.is_contiguous() && to.dtype() == from.dtype() && to.numel() == from.numel();
}

std::map<uintptr_t, size_t> page_locked;  // where ranges begin, and their bytes

bool is_page_locked(const Tensor& tensor) {
  const auto begin = uintptr_t(tensor.const_data_ptr());
  auto next = page_locked.upper_bound(begin);
  if (next == page_locked.begin()) return false;
  --next;
  return begin + tensor.nbytes() <= next->first + next->second;
}

void copy_later(const Tensor& to, const Tensor& from) {
  std::lock_guard<std::recursive_mutex> hold(streams_lock);
  auto& waiting = streams[current].waiting;
  if (!from.is_cuda() && !is_page_locked(from)) {
    const auto* bytes = static_cast<const char*>(from.const_data_ptr());
    waiting.emplace_back([target = Later(to), read = std::vector<char>(bytes, bytes + to.nbytes())] {
      if (target.there()) {
        std::memcpy(target.at, read.data(), read.size());
      } else {
        lost++;
      }
    });
    return;
  }
  waiting.emplace_back([target = Later(to), source = Later(from), count = to.nbytes()] {
    if (target.there() && source.there()) {
      std::memcpy(target.at, source.at, count);
    } else {
      lost++;
    }
  });
  if (!to.is_cuda() && !is_page_locked(to)) catch_up_own();
}

// Ops.

struct CardGenerator final : c10::GeneratorImpl {
  explicit CardGenerator(at::Generator host)
      : GeneratorImpl(kCard, DispatchKeySet(DispatchKey::CUDA)), host(std::move(host)) {}
  at::Generator host;
  c10::GeneratorImpl* own() const { return host.unsafeGetGeneratorImpl(); }
  void set_current_seed(uint64_t seed) override { own()->set_current_seed(seed); }
  void set_offset(uint64_t offset) override { own()->set_offset(offset); }
  uint64_t get_offset() const override { return own()->get_offset(); }
  uint64_t current_seed() const override { return own()->current_seed(); }
  uint64_t seed() override { return own()->seed(); }
  void set_state(const c10::TensorImpl& state) override { own()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return own()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new CardGenerator(host.clone()); }
};

// What takes indices from the host beside tensors of a card.
const std::unordered_set<std::string> kMixed{
    "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::_pack_padded_sequence"};

struct Call {
  std::unordered_map<c10::TensorImpl*, Tensor> tensors;      // the card's tensor of one on the host
  std::unordered_map<c10::StorageImpl*, Storage> storages;   // the card's storage of one on the host
  std::vector<Tensor> kept;
  std::vector<std::pair<Tensor, Tensor>> resized;  // a tensor of the card without elements, and what a kernel makes of it
  bool elsewhere = false;

  Tensor host(const Tensor& tensor, bool is_out) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      elsewhere |= tensor.dim() > 0;
      return tensor;
    }
    if (is_out && tensor.numel() == 0) {
      Tensor fresh = at::empty({0}, tensor.options().device(c10::kCPU));
      resized.emplace_back(tensor, fresh);
      tensors.emplace(fresh.unsafeGetTensorImpl(), tensor);
      return fresh;
    }
    Tensor made = on_host(tensor);
    tensors.emplace(made.unsafeGetTensorImpl(), tensor);
    storages.emplace(made.storage().unsafeGetStorageImpl(), tensor.storage());
    kept.push_back(made);
    return made;
  }

  Tensor card(const Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    auto same = tensors.find(tensor.unsafeGetTensorImpl());
    if (same != tensors.end()) return same->second;
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto known = storages.find(key);
    if (known == storages.end()) known = storages.emplace(key, to_card(tensor.storage())).first;
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        Storage(known->second), DispatchKeySet(DispatchKey::CUDA), tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.is_conj()) made._set_conj(true);
    if (tensor.is_neg()) made._set_neg(true);
    return made;
  }

  void finish() {
    for (auto& [card, fresh] : resized) {
      auto* impl = card.unsafeGetTensorImpl();
      impl->set_storage_keep_dtype(to_card(fresh.storage()));
      impl->set_sizes_and_strides(fresh.sizes(), fresh.strides(), fresh.storage_offset());
    }
  }
};

void run_on_host(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  catch_up_own();
  const auto& schema = op.schema();
  const auto begin = stack->size() - schema.arguments().size();
  Call call;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto& value = (*stack)[begin + i];
    const bool is_out = schema.arguments()[i].is_out();
    if (value.isTensor()) {
      value = call.host(value.toTensor(), is_out);
    } else if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& one : value.toTensorVector()) made.push_back(call.host(one, is_out));
      value = made;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (const auto& one : value.toOptionalTensorList().vec())
        made.push_back(one.has_value() ? std::optional<Tensor>(call.host(*one, false)) : std::nullopt);
      value = made;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      value = Device(c10::kCPU);
    } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      value = static_cast<CardGenerator*>(value.toGenerator().unsafeGetGeneratorImpl())->host;
    }
  }
  const auto name = c10::toString(op.operator_name());
  TORCH_CHECK(!call.elsewhere || kMixed.count(name),
              "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name, ")");
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  call.finish();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.card(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& one : value.toTensorVector()) made.push_back(call.card(one));
      value = made;
    }
  }
}

using Type = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Where = std::optional<Device>;
using Pin = std::optional<bool>;

Tensor empty(c10::IntArrayRef size, Type dtype, Layout, Where, Pin, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &allocator, DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, Type dtype, Layout, Where, Pin) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator, DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (current != 0 && non_blocking && is_flat(self, source)) {
    copy_later(self, source);
    return self;
  }
  catch_up_own();
  Tensor to = self.is_cuda() ? on_host(self) : self, from = source.is_cuda() ? on_host(source) : source;
  // Below autograd and modes, as any kernel.
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("aten::copy_", "")
                       .typed<Tensor&(Tensor&, const Tensor&, bool)>();
  op.redispatch(DispatchKeySet(DispatchKey::CPU), to, from, false);
  return self;
}

void grow(const Tensor& self, size_t nbytes) {
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() >= nbytes) return;
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  auto data = allocator.allocate(nbytes);
  if (storage->nbytes()) std::memcpy(data.get(), storage->data(), storage->nbytes());
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(nbytes);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() == size) return self;
  impl->set_sizes_contiguous(size);
  grow(self, (impl->storage_offset() + impl->numel()) * impl->itemsize());
  return self;
}

Tensor& set_storage(Tensor& self, Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", source.device(), "\"");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() != nullptr && stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  const auto itemsize = impl->itemsize();
  grow(self, at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), itemsize, impl->storage_offset()));
  return self;
}

Tensor& set_whole_storage(Tensor& self, Storage source) {
  const int64_t size = int64_t(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {size}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  return set_storage(self, Storage(Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true), 0, {0}, {});
}

// A CPU counts no integers.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  return at::histc(self.cpu().to(at::kFloat), bins, least, most).to(self.scalar_type()).to(kCard);
}

// What a card computes in one op has no kernel by that name on a CPU: attention is made of its ops.
int64_t attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                  std::optional<double>, bool) {
  return 0;
}

// What torch asks a backend for.

struct CardGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kCard; }
  Device getDevice() const override { return kCard; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device) const override { return c10::Stream(c10::Stream::DEFAULT, kCard); }
  c10::Stream getDefaultStream(Device) const override { return c10::Stream(c10::Stream::DEFAULT, kCard); }
  c10::Stream getNewStream(Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, kCard); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, CardGuard)

struct Placed {
  Placed() { c10::SetAllocator(DeviceType::CUDA, &allocator, /*priority=*/255); }
} placed;

}  // namespace

namespace at::cuda {
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  c10::Device getDeviceFromPtr(void*) const override { return kCard; }
  // The card draws the numbers that the host draws.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<CardGenerator>(at::detail::createCPUGenerator());
  }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at::cuda

namespace at::native {
struct Chosen {
  Chosen() { _fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention); }
} chosen;
}  // namespace at::native

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("histc", histc);
}

extern "C" {
int64_t card_live() { return live.load(); }
int64_t card_peak() { return peak.load(); }
void card_reset_peak() { peak.store(live.load()); }
void card_set_limit(int64_t nbytes) { limit.store(nbytes); }
// Copies whose memory was given back before they ran.
int64_t card_lost() { return lost.load(); }
void card_page_lock(int64_t begin, int64_t nbytes) {
  std::lock_guard<std::recursive_mutex> hold(streams_lock);
  if (nbytes) {
    page_locked[uintptr_t(begin)] = size_t(nbytes);
  } else {
    page_locked.erase(uintptr_t(begin));
  }
}
void card_enter(int64_t stream) { current = stream; }
// How much has been put on a stream, for an event that is recorded there.
int64_t card_put(int64_t stream) {
  std::lock_guard<std::recursive_mutex> hold(streams_lock);
  return streams[stream].put();
}
int64_t card_done(int64_t stream) {
  std::lock_guard<std::recursive_mutex> hold(streams_lock);
  return streams[stream].done;
}
void card_catch_up(int64_t stream, int64_t until) { catch_up(stream, until); }
// `stream` goes on behind what `other` has had to do so far.
void card_order(int64_t stream, int64_t other, int64_t until) {
  std::lock_guard<std::recursive_mutex> hold(streams_lock);
  if (stream == 0) {
    catch_up(other, until);
  } else if (stream != other) {
    streams[stream].waiting.emplace_back([other, until] { catch_up(other, until); });
  }
}
}
