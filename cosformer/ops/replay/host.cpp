// Recorded passes replayed without Python: allocations, launches, and an autograd node around them.
//
// `tape.py` records, `native.py` builds and loads. A program's tensors are numbered: the inputs,
// then those that it allocates. Whatever it cannot do is left to Python, by `fallback`.

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <mutex>
#include <unordered_map>

namespace at::autocast {  // its own header includes every operator
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType);
}

namespace {

constexpr size_t kLayouts = 16;  // of gradients, times those asked for, that one forward program has backward programs for

using at::Tensor;
using torch::autograd::variable_list;

using LaunchKernel = int(
    void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
    void* stream, void** arguments, void** extra);
using IsCapturing = int(void* stream, int* status);

struct {
  LaunchKernel* launch = nullptr;
  IsCapturing* is_capturing = nullptr;
  at::DeviceType device = at::kCUDA;
  PyObject* failed = nullptr;  // (error, device, again): returns if it is worth another try
} driver;

// An exception of Python's goes through autograd's thread as what it is.
template <class... Args>
py::object call(py::handle function, Args&&... args) {
  try {
    return function(std::forward<Args>(args)...);
  } catch (py::error_already_set& error) {
    error.restore();
    python_error kept;
    kept.persist();
    throw kept;
  }
}

struct Step {
  uintptr_t function;
  unsigned columns, rows, threads, shared;
  std::string arguments;                        // pointers to inputs and allocations left open
  std::vector<size_t> offsets;                  // where each argument begins
  std::vector<std::pair<size_t, size_t>> open;  // (offset, tensor) of each pointer
  std::vector<size_t> fresh, done;              // tensors to allocate before, to free after

  void launch(const variable_list& tensors, void* stream) const {
    std::string memory = arguments;
    for (auto [offset, n] : open) {
      void* pointer = tensors[n].data_ptr();
      std::memcpy(memory.data() + offset, &pointer, sizeof pointer);
    }
    std::vector<void*> places;
    places.reserve(offsets.size());
    for (auto offset : offsets) places.push_back(memory.data() + offset);
    for (bool again = false;; again = true) {
      int error = driver.launch(
          reinterpret_cast<void*>(function), columns, rows, 1, threads, 1, 1, shared, stream,
          places.data(), nullptr);
      if (!error) return;
      py::gil_scoped_acquire gil;
      call(driver.failed, error, tensors[0].device().index(), again);
    }
  }
};

struct Room {
  std::vector<int64_t> sizes, strides;
  at::TensorOptions options;
};

struct Program {
  std::vector<Step> steps;
  std::vector<Room> rooms;
  variable_list constants;  // whose pointers stand in the arguments
  std::vector<size_t> results;
  void* stream;
  bool copied;  // the last input, before it is used
  PyObject* fallback;
  std::mutex lock;
  std::unordered_map<std::string, Tensor> backwards;  // key -> the owner of a program

  Program(
      std::vector<Step> steps_, const variable_list& like, variable_list constants_,
      std::vector<size_t> results_, uintptr_t stream_, bool copied_, py::object fallback_)
      : steps(std::move(steps_)), constants(std::move(constants_)), results(std::move(results_)),
        stream(reinterpret_cast<void*>(stream_)), copied(copied_),
        fallback(fallback_.release().ptr()) {
    for (auto& x : like) rooms.push_back({x.sizes().vec(), x.strides().vec(), x.options()});
  }

  ~Program() {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(fallback);
  }

  variable_list run(variable_list tensors) const {
    c10::DeviceGuard guard(tensors[0].device());
    auto inputs = tensors.size();
    tensors.resize(inputs + rooms.size());
    for (auto& step : steps) {
      for (auto n : step.fresh) {
        auto& room = rooms[n - inputs];
        tensors[n] = at::empty_strided(room.sizes, room.strides, room.options);
      }
      step.launch(tensors, stream);
      for (auto n : step.done) tensors[n].reset();
    }
    variable_list found;
    for (auto n : results) found.push_back(tensors[n]);
    return found;
  }

  Tensor backward(const std::string& key) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = backwards.find(key);
    return found == backwards.end() ? Tensor() : found->second;
  }

  void learn(std::string key, Tensor owner) {
    std::lock_guard<std::mutex> guard(lock);
    if (backwards.size() < kLayouts) backwards.emplace(std::move(key), std::move(owner));
  }
};

// A tensor owns a program: such an owner autograd can save, and compiled autograd carry.
Tensor own(Program* program) {
  return at::from_blob(
      program, {1}, [](void* kept) { delete static_cast<Program*>(kept); }, at::kByte);
}

Program& owned(const Tensor& owner) {
  return *static_cast<Program*>(owner.storage().mutable_data());
}

template <class T>
void put(std::string& key, T value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

bool plain(const Tensor& x) {
  return x.device().type() == driver.device && x.layout() == at::kStrided && !x.is_nested() &&
      x.has_storage() && !x.key_set().has(c10::DispatchKey::Python) && !x._fw_grad(0).defined();
}

// All that choices on the way to the kernels look at, values of options excepted; "" for tensors
// that no program takes.
std::string describe(const variable_list& tensors) {
  std::string key;
  key.reserve(192 * tensors.size());
  auto state = c10::impl::tls_local_dispatch_key_set();  // modes, transforms, autocast, inference
  put(key, state.included_.raw_repr());
  put(key, state.excluded_.raw_repr());
  for (auto& x : tensors) {
    if (!plain(x)) return {};
    put(key, x.key_set().raw_repr());
    put(key, x.scalar_type());
    put(key, x.device().index());
    put(key, x.dim());
    for (auto n : x.sizes()) put(key, n);
    for (auto n : x.strides()) put(key, n);
    put(key, reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0);
  }
  auto device = tensors[0].device();
  put(key, at::autocast::get_autocast_dtype(device.type()));
  put(key, c10::impl::getDeviceGuardImpl(device.type())->getStream(device).id());
  return key;
}

py::object key_of(py::handle q, py::handle k, py::handle v) {
  // Under hooks as those of checkpointing every call must save the same tensors as the first.
  if (at::impl::torch_function_mode_enabled() ||
      !at::SavedTensorDefaultHooks::get_tls_state().stack.empty())
    return py::none();
  variable_list tensors;
  for (auto object : {q, k, v}) {
    if (!THPVariable_CheckExact(object.ptr())) return py::none();
    tensors.push_back(THPVariable_Unpack(object.ptr()));
  }
  auto key = describe(tensors);
  return key.empty() ? py::object(py::none()) : py::bytes(key);
}

struct Attention : torch::autograd::Function<Attention> {
  static variable_list forward(
      torch::autograd::AutogradContext* ctx, Tensor q, Tensor k, Tensor v, Tensor owner) {
    auto found = owned(owner).run({q, k, v});  // out, total and, maybe, what is kept for backward
    variable_list saved = {q, k, v};
    saved.insert(saved.end(), found.begin(), found.end());
    saved.push_back(owner);
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    found.resize(2);
    return found;
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, variable_list grads) {
    std::vector<bool> asked;  // of q, k and v
    for (size_t n : {0, 1, 2}) asked.push_back(ctx->needs_input_grad(n));
    auto tensors = ctx->get_saved_variables();
    auto owner = std::move(tensors.back());
    tensors.pop_back();
    auto& program = owned(owner);
    std::string key;
    if (!at::GradMode::is_enabled() && grads[0].defined() && !grads[1].defined()) {
      tensors.push_back(grads[0]);
      key = describe(tensors);
      if (!key.empty()) for (bool each : asked) put(key, each);
      auto known = program.backward(key);
      if (known.defined()) {
        if (owned(known).copied) tensors.back() = grads[0].clone(at::MemoryFormat::Contiguous);
        return placed(owned(known).run(std::move(tensors)), asked);
      }
      tensors.pop_back();
    }
    py::gil_scoped_acquire gil;
    auto answer = call(program.fallback, tensors, grads[0], grads[1], asked);
    auto [found, learnt] =
        answer.cast<std::pair<variable_list, std::optional<Tensor>>>();
    if (learnt && !key.empty()) program.learn(std::move(key), std::move(*learnt));
    return placed(found, asked);
  }

  // Gradients of q, k, v and the owner, undefined where nobody asks.
  static variable_list placed(const variable_list& found, const std::vector<bool>& asked) {
    variable_list all(4);
    auto next = found.begin();
    for (size_t n = 0; n < asked.size(); ++n) {
      if (asked[n]) all[n] = *next++;
    }
    return all;
  }
};

// None in a stream that is captured: a graph wants its constants kept for as long as it lives.
std::optional<Tensor> replay(
    const Tensor& owner, const Tensor& q, const Tensor& k, const Tensor& v) {
  py::gil_scoped_release released;
  auto& program = owned(owner);
  int status = 0;
  if (driver.is_capturing && (driver.is_capturing(program.stream, &status) || status)) return {};
  bool recorded = at::GradMode::is_enabled() &&
      (q.requires_grad() || k.requires_grad() || v.requires_grad());
  return recorded ? Attention::apply(q, k, v, owner)[0] : program.run({q, k, v})[0];
}

Tensor program(
    std::vector<Step> steps, const variable_list& like, variable_list constants,
    std::vector<size_t> results, uintptr_t stream, bool copied, py::object fallback) {
  return own(new Program(
      std::move(steps), like, std::move(constants), std::move(results), stream, copied,
      std::move(fallback)));
}

void connect(uintptr_t launch, uintptr_t is_capturing, std::string device, py::object failed) {
  driver.launch = reinterpret_cast<LaunchKernel*>(launch);
  driver.is_capturing = reinterpret_cast<IsCapturing*>(is_capturing);
  driver.device = c10::Device(device).type();
  driver.failed = failed.release().ptr();
}

}  // namespace

PYBIND11_MODULE(cosformer_host, module) {
  module.def("connect", connect);
  module.def("key_of", key_of);
  py::class_<Step>(module, "Step")
      .def(py::init<
           uintptr_t, unsigned, unsigned, unsigned, unsigned, std::string, std::vector<size_t>,
           std::vector<std::pair<size_t, size_t>>, std::vector<size_t>, std::vector<size_t>>());
  module.def("program", program);
  module.def("replay", replay);
}
