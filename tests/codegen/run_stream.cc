// Runs `main` of an exported library with one input and state, without Python:
// LIBRARY INPUT OUTPUT STEPS DIM...
// INPUT has float32 of the shape (STEPS, DIM...), OUTPUT gets the first result of every step.

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <vector>

using tvm::ffi::AnyView;
using tvm::ffi::Array;
using tvm::ffi::Module;
using tvm::ffi::Tensor;

struct AlignedMemory {
  void AllocData(DLTensor* tensor) {
    constexpr size_t kAlignment = 64;
    size_t size = tvm::ffi::GetDataSize(*tensor);
    tensor->data = std::aligned_alloc(kAlignment, (size / kAlignment + 1) * kAlignment);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

int main(int, char** argv) {
  std::vector<int64_t> shape;
  for (char** dim = argv + 5; *dim; ++dim) shape.push_back(std::atoll(*dim));
  auto input = Tensor::FromNDAlloc(AlignedMemory(), tvm::ffi::Shape(shape),
                                   DLDataType{kDLFloat, 32, 1}, DLDevice{kDLCPU, 0});
  std::ifstream samples(argv[2], std::ios::binary);
  std::ofstream results(argv[3], std::ios::binary);

  Module vm =
      Module::LoadFromFile(argv[1])->GetFunction("vm_load_executable").value()().cast<Module>();
  constexpr int kPooled = 2;
  vm->GetFunction("vm_initialization").value()(static_cast<int>(kDLCPU), 0, kPooled);
  auto run = vm->GetFunction("main").value();
  auto state = vm->GetFunction("relayquant_initial_state").value()().cast<Array<Tensor>>();
  for (int step = 0; step < std::atoi(argv[4]); ++step) {
    samples.read(static_cast<char*>(input.data_ptr()), input.numel() * sizeof(float));
    std::vector<AnyView> arguments{input};
    for (const Tensor& value : state) arguments.push_back(value);
    tvm::ffi::Any result;
    run.CallPacked(arguments.data(), arguments.size(), &result);
    auto outputs = result.cast<Array<Tensor>>();
    Tensor first = outputs[0];
    results.write(static_cast<const char*>(first.data_ptr()), first.numel() * sizeof(float));
    state = Array<Tensor>(outputs.end() - state.size(), outputs.end());
  }
}
