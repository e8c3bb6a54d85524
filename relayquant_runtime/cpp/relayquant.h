// Runs a library that `rq.compile(...).export_library` wrote: load, run, state. Header only, C++17.
//
//     relayquant::Model model("deploy/model.so");
//     auto x = relayquant::empty({1, 3, 224, 224}, "float32");
//     std::memcpy(x.data_ptr(), pixels, relayquant::count_bytes(x));
//     auto results = model.run("main", {x});
//
// Needs the headers of tvm-ffi, libtvm_ffi.so and libtvm_runtime.so, and for models that sort
// libtvm_runtime_extra.so. All errors are exceptions derived from std::exception.

#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/stat.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace relayquant {

namespace ffi = tvm::ffi;

// Memory of a tensor, as compiled code needs it.
struct AlignedMemory {
  static constexpr size_t kAlignment = 64;
  void AllocData(DLTensor* tensor) {
    size_t bytes = ffi::GetDataSize(*tensor);
    tensor->data = std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment);
    if (tensor->data == nullptr) throw std::bad_alloc();
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

// A new tensor on the CPU. Its values are not set.
inline ffi::Tensor empty(const std::vector<int64_t>& shape, const std::string& dtype) {
  DLDataType type = ffi::StringToDLDataType(dtype);
  return ffi::Tensor::FromNDAlloc(AlignedMemory(), ffi::ShapeView(shape.data(), shape.size()), type,
                                  DLDevice{kDLCPU, 0});
}

inline size_t count_bytes(const ffi::Tensor& tensor) { return ffi::GetDataSize(tensor); }

inline ffi::Tensor copy(const ffi::Tensor& tensor) {
  auto shape = tensor.shape();
  ffi::Tensor made = ffi::Tensor::FromNDAlloc(AlignedMemory(), shape, tensor.dtype(), tensor.device());
  std::memcpy(made.data_ptr(), tensor.data_ptr(), count_bytes(tensor));
  return made;
}

// A compiled model. Several threads may use it; runs take turns. For runs at the same time make one
// Model per thread: models of one file share its large constants.
//
// If the model has state, `run` takes and gives what is left without the state, and holds the state
// for the next run.
class Model {
 public:
  // Load a library. Throws if there is no such file, or it is for another CPU, or for instructions
  // that this one lacks.
  explicit Model(const std::string& path) : machine_(load(path)) {
    const int pooled = 2;  // an allocator that keeps memory for the next run
    find("vm_initialization")(static_cast<int>(kDLCPU), 0, pooled);
    if (machine_->GetFunction("relayquant_state").has_value()) read_state();
    reset();
  }

  // Call a function with tensors, in order (ffi::Shape for a parameter that is a shape). Throws if
  // there is no such function, or an argument has another shape or dtype than it takes.
  std::vector<ffi::Tensor> run(const std::string& name, std::vector<ffi::Any> inputs) {
    ffi::Function function = find(name);
    std::lock_guard<std::mutex> lock(running_);  // TVM's virtual machine has one stack
    const Place place = places_.count(name) ? places_[name] : Place{};
    if (inputs.size() < place.first) throw std::runtime_error(name + ": an input is missing");
    std::vector<ffi::Any> held;
    for (const std::string& state : place.names) held.push_back(state_[state]);
    const std::vector<ffi::Any> given = inputs;
    inputs.insert(inputs.begin() + place.first, held.begin(), held.end());
    std::vector<ffi::AnyView> views(inputs.begin(), inputs.end());
    ffi::Any result;
    function.CallPacked(views.data(), static_cast<int>(views.size()), &result);
    std::vector<ffi::Tensor> results;
    flatten(result, &results);
    // The last results are the new state. What shares memory with a tensor of the caller, or with
    // another state, is copied.
    const size_t left = results.size() - place.names.size();
    for (size_t i = 0; i < place.names.size(); ++i) {
      const ffi::Tensor& next = results[left + i];
      state_[place.names[i]] = is_shared(next, given, results, left + i) ? copy(next) : next;
    }
    results.resize(left);
    return results;
  }

  // Begin again: the next run takes the initial state.
  void reset() {
    if (names_.empty()) return;
    std::lock_guard<std::mutex> lock(running_);
    std::vector<ffi::Tensor> values;
    flatten(find("relayquant_initial_state")(), &values);
    for (size_t i = 0; i < names_.size(); ++i) state_[names_[i]] = values.at(i);
  }

  // Name -> a copy of the value that the next run takes. A run may write into the value itself.
  std::map<std::string, ffi::Tensor> state() const {
    std::lock_guard<std::mutex> lock(running_);
    std::map<std::string, ffi::Tensor> copies;
    for (const auto& [name, value] : state_) copies[name] = copy(value);
    return copies;
  }

  // Let the next run take a copy of `value`. Throws if there is no such state, or it has another
  // shape or dtype.
  void set_state(const std::string& name, const ffi::Tensor& value) {
    std::lock_guard<std::mutex> lock(running_);
    auto held = state_.find(name);
    if (held == state_.end()) throw std::runtime_error("The model has no state '" + name + "'");
    const std::string given = describe(value), wanted = describe(held->second);
    if (given != wanted || !value.IsContiguous()) {
      throw std::runtime_error("State '" + name + "' is " + given + "; the model takes " + wanted);
    }
    held->second = copy(value);
  }

 private:
  // Where a function has state: number of its first parameter that is state, and the names.
  struct Place {
    size_t first = 0;
    std::vector<std::string> names;
  };

  // A path to the file by which no other file was ever loaded. The system's loader takes a path
  // that it knows for the library that it has, so a model that was replaced would be the old one.
  // "/" and "/./" lead to the same folder; they spell the file's number. The path is absolute: a
  // bare name would be searched in the system's folders only.
  static std::string spell_version(const std::string& path) {
    std::filesystem::path place = std::filesystem::absolute(path);
    struct stat status;
    if (stat(place.c_str(), &status) != 0) throw std::runtime_error("Cannot read " + path);
    std::string spelled = place.parent_path().string() + "/";
    for (uint64_t number : {uint64_t(status.st_dev), uint64_t(status.st_ino)}) {
      for (int bit = 63; bit >= 0; --bit) spelled += (number >> bit & 1) ? "./" : "/";
    }
    return spelled + place.filename().string();
  }

  static ffi::Module load(const std::string& path) {
    // TVM's idle threads would spin, which costs more than it gains beside any other process.
    setenv("TVM_THREAD_POOL_SPIN_COUNT", "0", 0);
    if (std::filesystem::is_directory(path)) {
      const std::filesystem::path library = std::filesystem::path(path) / "model.so";
      const bool is_there = std::filesystem::is_regular_file(library);
      throw std::runtime_error(path + " is a folder. Pass the library in it: " + library.string() +
                               (is_there ? "" : ", which it lacks. export_bundle writes it"));
    }
    if (!std::filesystem::is_regular_file(path)) throw std::runtime_error("There is no file " + path);
    check_length(path);
    const std::string version = spell_version(path);
    ffi::Module library = open_library(path, version);
    check_instructions(path, version);
    ffi::Optional<ffi::Function> load = library->GetFunction("vm_load_executable");
    if (!load.has_value()) throw std::runtime_error(path + " is no library that export_library wrote");
    return (*load)().cast<ffi::Module>();
  }

  // Throws if the file ends before its table of sections does, which linkers write last: a read
  // behind the end of a mapped file would end the process.
  static void check_length(const std::string& path) {
    ElfW(Ehdr) head = {};
    std::ifstream file(path, std::ios::binary);
    if (!file.read(reinterpret_cast<char*>(&head), sizeof(head))) return;
    const int word = sizeof(head.e_entry) == 8 ? ELFCLASS64 : ELFCLASS32;
    if (std::memcmp(head.e_ident, ELFMAG, SELFMAG) != 0 || head.e_ident[EI_CLASS] != word) return;
    const uint64_t wanted = head.e_shoff + uint64_t(head.e_shentsize) * head.e_shnum;
    const uint64_t have = std::filesystem::file_size(path);
    if (have < wanted) {
      throw std::runtime_error(path + " was cut off: it has " + std::to_string(have) + " of " +
                               std::to_string(wanted) + " bytes");
    }
  }

  // The system's loader says "No such file" of a library for another CPU.
  static ffi::Module open_library(const std::string& path, const std::string& version) {
    try {
      return ffi::Module::LoadFromFile(version);
    } catch (const std::exception& error) {
      std::string text = error.what();
      for (size_t at; (at = text.find(version)) != std::string::npos;) {
        text.replace(at, version.size(), path);
      }
      throw std::runtime_error(path + " cannot be loaded: it is for another CPU, is damaged, or " +
                               "needs a library that is not there. " + text);
    }
  }

  // Throws if the library may use instructions that this machine lacks: its first kernel would end
  // the process. `version` is the path by which it was loaded.
  static void check_instructions(const std::string& path, const std::string& version) {
    void* handle = dlopen(version.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) return;
    const auto* text = static_cast<const char*>(dlsym(handle, "relayquant_description"));
    const auto described = ffi::json::Parse(text == nullptr ? "{}" : text).cast<ffi::json::Object>();
    dlclose(handle);
    const std::set<std::string> present = read_flags();
    if (present.empty() || described.count("target") == 0) return;
    const auto target = described["target"].cast<ffi::json::Object>();
    if (target.count("flags") == 0) return;
    std::string missing;
    for (const ffi::Any& flag : target["flags"].cast<ffi::json::Array>()) {
      const std::string name = flag.cast<ffi::String>();
      if (present.count(name) == 0) missing += " " + name;
    }
    if (!missing.empty()) {
      throw std::runtime_error(path + " was compiled for instructions that this machine lacks:" +
                               missing + ". Compile the model for this machine's CPU");
    }
  }

  // What Linux says that this machine has; empty where it cannot be read.
  static std::set<std::string> read_flags() {
#if defined(__x86_64__) || defined(__i386__)
    const std::string first = "flags";
#else
    const std::string first = "Features";
#endif
    std::ifstream file("/proc/cpuinfo");
    for (std::string line, word; std::getline(file, line);) {
      std::istringstream words(line);
      if (!(words >> word) || word != first) continue;
      std::set<std::string> found;
      while (words >> word) found.insert(word);
      return found;
    }
    return {};
  }

  ffi::Function find(const std::string& name) {
    ffi::Optional<ffi::Function> found = machine_->GetFunction(name);
    if (!found.has_value()) {
      throw std::runtime_error("The library has no function '" + name + "'; a model's is mostly 'main'");
    }
    return *found;
  }

  void read_state() {
    ffi::Tensor text = find("relayquant_state")().cast<ffi::Tensor>();
    std::string json(static_cast<const char*>(text.data_ptr()), count_bytes(text));
    auto described = ffi::json::Parse(json).cast<ffi::json::Object>();
    for (const ffi::Any& row : described["values"].cast<ffi::json::Array>()) {
      names_.push_back(row.cast<ffi::json::Object>()["name"].cast<ffi::String>());
    }
    for (const auto& [function, value] : described["functions"].cast<ffi::json::Object>()) {
      auto row = value.cast<ffi::json::Object>();
      Place place;
      place.first = static_cast<size_t>(row["first"].cast<int64_t>());
      for (const ffi::Any& name : row["names"].cast<ffi::json::Array>()) {
        place.names.push_back(name.cast<ffi::String>());
      }
      places_[function.cast<ffi::String>()] = place;
    }
  }

  // Dtype and shape: "float32 (1, 3)".
  static std::string describe(const ffi::Tensor& tensor) {
    std::string sizes;
    for (int64_t size : tensor.shape()) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
    return std::string(ffi::DLDataTypeToString(tensor.dtype())) + " (" + sizes + ")";
  }

  // Tensors of a result, nested tuples taken apart.
  static void flatten(const ffi::Any& result, std::vector<ffi::Tensor>* found) {
    if (auto tensor = result.try_cast<ffi::Tensor>()) {
      found->push_back(*tensor);
    } else {
      for (const ffi::Any& part : result.cast<ffi::Array<ffi::Any>>()) flatten(part, found);
    }
  }

  static bool is_shared(const ffi::Tensor& tensor, const std::vector<ffi::Any>& inputs,
                        const std::vector<ffi::Tensor>& results, size_t number) {
    for (const ffi::Any& input : inputs) {
      auto other = input.try_cast<ffi::Tensor>();
      if (other && other->data_ptr() == tensor.data_ptr()) return true;
    }
    for (size_t i = 0; i < number; ++i) {
      if (results[i].data_ptr() == tensor.data_ptr()) return true;
    }
    return false;
  }

  ffi::Module machine_;
  std::vector<std::string> names_;
  std::map<std::string, Place> places_;
  std::map<std::string, ffi::Tensor> state_;
  mutable std::mutex running_;
};

}  // namespace relayquant
