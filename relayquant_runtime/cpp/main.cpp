// Runs the model of a folder that `rq.export_bundle` wrote and prints its results.
//
//     run FOLDER [--steps N] [--threads N] [--models N] [INPUT.bin ...]
//
// INPUT.bin has the raw bytes of an input, in C order, as numpy's `tofile` writes them. Inputs
// without a file are zeros, and a free size without a file is 1. --steps runs a model with state so
// many times, and prints the results of the last run. --models runs that many models at the same
// time, each in a thread. --threads is the number of threads of one run.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <thread>

#include "relayquant.h"

using relayquant::ffi::Any;
using relayquant::ffi::String;
using relayquant::ffi::Tensor;
namespace json = relayquant::ffi::json;

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("Cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The tensor of an input, from the bytes of its file. A free size follows from the number of bytes.
Tensor make_input(const json::Object& row, const std::string* bytes) {
  const std::string dtype = row["dtype"].cast<String>(), name = row["name"].cast<String>();
  std::vector<int64_t> shape;
  int64_t known = 1, free_sizes = 0;
  for (const Any& size : row["shape"].cast<json::Array>()) {
    const auto number = size.try_cast<int64_t>();
    shape.push_back(number ? *number : -1);
    if (number) known *= *number;
    free_sizes += !number;
  }
  const int64_t item = static_cast<int64_t>(relayquant::count_bytes(relayquant::empty({1}, dtype)));
  int64_t size = 1;
  if (bytes != nullptr && free_sizes == 1) size = std::max<int64_t>(1, bytes->size() / (known * item));
  for (int64_t& each : shape) each = each < 0 ? size : each;
  Tensor tensor = relayquant::empty(shape, dtype);
  const size_t wanted = relayquant::count_bytes(tensor);
  if (bytes != nullptr && bytes->size() != wanted) {
    throw std::runtime_error("input '" + name + "' has " + std::to_string(bytes->size()) + " bytes; " +
                             "the model takes " + std::to_string(wanted));
  }
  std::memset(tensor.data_ptr(), 0, wanted);
  if (bytes != nullptr) std::memcpy(tensor.data_ptr(), bytes->data(), wanted);
  return tensor;
}

template <typename T>
void print_values(const Tensor& tensor) {
  const T* values = static_cast<const T*>(tensor.data_ptr());
  std::cout.precision(std::numeric_limits<double>::max_digits10);
  for (int64_t i = 0; i < tensor.numel(); ++i) std::cout << (i ? " " : "") << +values[i];
}

// One line: dtype, shape, ":" and the values.
void print(const Tensor& tensor) {
  const std::string dtype = relayquant::ffi::DLDataTypeToString(tensor.dtype());
  std::cout << dtype;
  for (int64_t size : tensor.shape()) std::cout << " " << size;
  std::cout << ": ";
  if (dtype == "float32") print_values<float>(tensor);
  else if (dtype == "float64") print_values<double>(tensor);
  else if (dtype == "int64") print_values<int64_t>(tensor);
  else if (dtype == "int32") print_values<int32_t>(tensor);
  else if (dtype == "int8") print_values<int8_t>(tensor);
  else if (dtype == "uint8" || dtype == "bool") print_values<uint8_t>(tensor);
  else std::cout << relayquant::count_bytes(tensor) << " bytes";
  std::cout << "\n";
}

// The number behind an option.
int read_number(const std::string& option, const std::string& text) {
  const bool is_number = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  if (!is_number || text.size() > 9) throw std::runtime_error(option + " takes a number, not '" + text + "'");
  return std::stoi(text);
}

int run(const std::vector<std::string>& words) {
  std::map<std::string, int> numbers = {{"--steps", 1}, {"--threads", 0}, {"--models", 1}};
  std::vector<std::string> places;
  for (size_t i = 0; i < words.size(); ++i) {
    if (!numbers.count(words[i])) places.push_back(words[i]);
    else numbers[words[i]] = read_number(words[i], i + 1 < words.size() ? words[i + 1] : ""), ++i;
  }
  const std::string usage = "Usage: run FOLDER [--steps N] [--threads N] [--models N] [INPUT.bin ...]";
  if (places.empty()) throw std::runtime_error(usage);
  // Threads are made when the first model runs, so this comes before.
  if (numbers["--threads"] > 0) setenv("TVM_NUM_THREADS", std::to_string(numbers["--threads"]).c_str(), 1);

  const std::string folder = places[0];
  const auto bundle = json::Parse(read_file(folder + "/bundle.json")).cast<json::Object>();
  const auto functions = bundle["functions"].cast<json::Object>();
  const std::string name = bundle["entry"].cast<String>();
  const auto rows = functions[String(name)].cast<json::Object>()["inputs"].cast<json::Array>();
  if (places.size() - 1 > rows.size()) {
    throw std::runtime_error("Inputs of the model: " + std::to_string(rows.size()) + "; files given: " +
                             std::to_string(places.size() - 1) + ". " + usage);
  }
  std::vector<Any> inputs;
  for (const Any& row : rows) {
    std::string bytes;
    const bool has_file = inputs.size() + 1 < places.size();
    if (has_file) bytes = read_file(places[inputs.size() + 1]);
    inputs.push_back(make_input(row.cast<json::Object>(), has_file ? &bytes : nullptr));
  }

  std::vector<std::vector<Tensor>> results(numbers["--models"]);
  std::vector<std::exception_ptr> errors(results.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < results.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        relayquant::Model model(folder + "/" + std::string(bundle["library"].cast<String>()));
        for (int step = 0; step < numbers["--steps"]; ++step) results[i] = model.run(name, inputs);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) if (error) std::rethrow_exception(error);
  for (const auto& model : results) for (const Tensor& tensor : model) print(tensor);
  if (!std::cout.flush()) throw std::runtime_error("Cannot write the results");
  return 0;
}

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
