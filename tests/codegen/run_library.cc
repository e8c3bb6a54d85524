// Runs `main` of an exported library without Python: LIBRARY INPUT OUTPUT RUNS DIM...
// INPUT and OUTPUT are float32 as they are in memory. Every run must give the same bits. Prints how
// many threads the process has in the end.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <iostream>
#include <vector>

struct AlignedMemory {
  void AllocData(DLTensor* tensor) {
    constexpr size_t kAlignment = 64;
    size_t size = tvm::ffi::GetDataSize(*tensor);
    tensor->data = std::aligned_alloc(kAlignment, (size / kAlignment + 1) * kAlignment);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

int main(int argc, char** argv) {
  using tvm::ffi::Module;
  std::vector<int64_t> shape;
  for (int i = 5; i < argc; ++i) shape.push_back(std::atoll(argv[i]));
  DLDevice cpu{kDLCPU, 0};
  auto input = tvm::ffi::Tensor::FromNDAlloc(AlignedMemory(), tvm::ffi::Shape(shape),
                                             DLDataType{kDLFloat, 32, 1}, cpu);
  std::ifstream(argv[2], std::ios::binary)
      .read(static_cast<char*>(input.data_ptr()), input.numel() * sizeof(float));

  Module library = Module::LoadFromFile(argv[1]);
  Module vm = library->GetFunction("vm_load_executable").value()().cast<Module>();
  constexpr int kPooled = 2;
  vm->GetFunction("vm_initialization").value()(static_cast<int>(kDLCPU), 0, kPooled);
  auto run = vm->GetFunction("main").value();

  std::vector<char> first;
  for (int i = 0; i < std::atoi(argv[4]); ++i) {
    auto output = run(input).cast<tvm::ffi::Tensor>();
    size_t size = output.numel() * sizeof(float);
    const char* data = static_cast<const char*>(output.data_ptr());
    if (i == 0) first.assign(data, data + size);
    if (first.size() != size || std::memcmp(first.data(), data, size)) {
      std::cerr << "run " << i << " differs from the first\n";
      return 1;
    }
  }
  std::ofstream(argv[3], std::ios::binary).write(first.data(), first.size());
  std::filesystem::directory_iterator threads("/proc/self/task");
  std::cout << std::distance(begin(threads), end(threads)) << "\n";
}
