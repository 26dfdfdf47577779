// Times normalisations on a GPU, inside a CUDA graph, after checking their answers against the float64 oracle.
//
//   gpu_normalization [--dtype=float32|bfloat16] [--rows=32x4x20,ragged,...]
//
// A line of JSON for each row and kind of work: the error, microseconds (median of many replays), which kernel. The
// families are launched as the backend launches them; tensors are the device's. gpu_normalization.py puts other
// libraries beside them.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/family.h"
#include "tests/bench/gpu_check.h"
#include "tests/oracle/normalization.h"

ABSL_FLAG(std::string, dtype, "float32", "Type of all tensors: float32 or bfloat16.");
ABSL_FLAG(std::string, rows,
          "32x4x20,128x4x20,32x8x20,128x8x20,65536x4x20,65536x8x10,65536x8x20,1048576x4x20,4096x16x100,16384x32x20,"
          "1024x64x20,256x256x20,64x1000x20,65536xraggedx20",
          "Rows: members x side x iterations; side `ragged`: uniform in 2..32.");
ABSL_FLAG(std::string, works, "forward,unrolled,implicit", "What is timed of each row.");
ABSL_FLAG(std::string, recipe, "log",
          "log, exp, deepseek, or `guarded`: deepseek with a guard that only general kernels take.");
ABSL_FLAG(
    bool, host_tallies, false,
    "Kernels write their certificates' tallies to pinned host memory, as under the backend; else to the device's.");
ABSL_FLAG(double, seconds, 0.15, "Replays of a row take about that long.");

namespace sinkhorn {
namespace {

// ---- Memory ---------------------------------------------------------------------------------------------------------
struct Bytes {
  explicit Bytes(size_t size) : size(size) { Check(cudaMalloc(&data, std::max<size_t>(size, 256)), "cudaMalloc"); }
  ~Bytes() { (void)cudaFree(data); }
  Bytes(const Bytes&) = delete;
  void* data = nullptr;
  const size_t size;
};

float FromBFloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
uint16_t ToBFloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A tensor on the device and what it was made of.
class Tensor {
 public:
  Tensor(DType dtype, int64_t size) : dtype_(dtype), size_(size), bytes_(size * SizeOf(dtype)) {
    Check(cudaMemset(bytes_.data, 0xff, bytes_.size), "poisoning");  // NaN
  }
  void Fill(std::mt19937_64* random) {
    // A table of normal numbers, read in another order for each of its lengths.
    constexpr int64_t kTable = 1 << 18;
    std::normal_distribution<float> normal;
    std::vector<float> table(kTable), values(size_);
    for (float& value : table) value = normal(*random);
    for (int64_t k = 0; k < size_; ++k) values[k] = table[(k ^ (k / kTable * 40503)) % kTable];
    if (dtype_ == DType::kFloat32) {
      Check(cudaMemcpy(bytes_.data, values.data(), bytes_.size, cudaMemcpyHostToDevice), "copying");
      return;
    }
    std::vector<uint16_t> shorts(size_);
    for (int64_t k = 0; k < size_; ++k) shorts[k] = ToBFloat16(values[k]);
    Check(cudaMemcpy(bytes_.data, shorts.data(), bytes_.size, cudaMemcpyHostToDevice), "copying");
  }
  oracle::Vector Values(int64_t begin, int64_t count) const {
    oracle::Vector values(count);
    std::vector<char> raw(count * SizeOf(dtype_));
    Check(cudaMemcpy(raw.data(), static_cast<const char*>(bytes_.data) + begin * SizeOf(dtype_), raw.size(),
                     cudaMemcpyDeviceToHost),
          "copying");
    for (int64_t k = 0; k < count; ++k) {
      values[k] = dtype_ == DType::kFloat32 ? reinterpret_cast<const float*>(raw.data())[k]
                                            : FromBFloat16(reinterpret_cast<const uint16_t*>(raw.data())[k]);
    }
    return values;
  }
  TensorView view() const { return {dtype_, bytes_.data, false}; }
  OutputView output() { return {dtype_, bytes_.data}; }

 private:
  const DType dtype_;
  const int64_t size_;
  Bytes bytes_;
};

// The backend's part: a stream and memory for one slice.
class Context final : public cuda::LaunchContext {
 public:
  explicit Context(const DeviceInfo& device) : device_(device) {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream");
    Check(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "a stream");
  }
  ~Context() override {
    Reset();
    (void)cudaStreamDestroy(stream_);
    (void)cudaStreamDestroy(copies_);
  }
  const DeviceInfo& device() const override { return device_; }
  CUstream_st* stream() const override { return stream_; }
  const void* Upload(const void* data, size_t bytes) override {
    void* copy = Scratch(bytes);
    Check(cudaMemcpyAsync(copy, data, bytes, cudaMemcpyHostToDevice, copies_), "uploading");
    Check(cudaStreamSynchronize(copies_), "uploading");
    return copy;
  }
  void* Scratch(size_t bytes) override {
    taken_.push_back(std::make_unique<Bytes>(bytes));
    return taken_.back()->data;
  }
  void* HostVisible(size_t bytes, void** device_address) override {
    void* pinned = nullptr;
    Check(cudaMallocHost(&pinned, std::max<size_t>(bytes, 256)), "cudaMallocHost");
    std::memset(pinned, 0, bytes);
    pinned_.push_back(pinned);
    *device_address = absl::GetFlag(FLAGS_host_tallies) || !timing ? pinned : Scratch(bytes);
    return pinned;
  }
  bool timing = false;  // Nobody will read the tallies.
  void Reset() {
    taken_.clear();
    for (void* pinned : pinned_) (void)cudaFreeHost(pinned);
    pinned_.clear();
  }

 private:
  const DeviceInfo device_;
  cudaStream_t stream_ = nullptr, copies_ = nullptr;
  std::vector<std::unique_ptr<Bytes>> taken_;
  std::vector<void*> pinned_;
};

// ---- A row ----------------------------------------------------------------------------------------------------------
struct Part {  // Members of one shape.
  int64_t count, side;
};
struct Row {
  std::string name;
  std::vector<Part> parts;
  int iterations = 0;
};

Row ParseRow(const std::string& name) {
  Row row;
  row.name = name;
  const std::vector<std::string> words = absl::StrSplit(name, 'x');
  int64_t count = 0, side = 0;
  if (words.size() != 3 || !absl::SimpleAtoi(words[0], &count) || !absl::SimpleAtoi(words[2], &row.iterations)) {
    std::fprintf(stderr, "not a row: %s\n", name.c_str());
    std::exit(1);
  }
  if (absl::SimpleAtoi(words[1], &side)) {
    row.parts.push_back({count, side});
    return row;
  }
  std::mt19937_64 random(1);
  std::vector<int64_t> counts(33);
  for (int64_t k = 0; k < count; ++k) ++counts[2 + random() % 31];
  for (int64_t n = 2; n <= 32; ++n) row.parts.push_back({counts[n], n});
  return row;
}

// One part on the device.
struct Work {
  Work(const Part& part, DType dtype, std::mt19937_64* random)
      : part(part),
        logits(dtype, part.count * part.side * part.side),
        cotangent(dtype, part.count * part.side * part.side),
        plan(dtype, part.count * part.side * part.side),
        gradient(dtype, part.count * part.side * part.side) {
    logits.Fill(random);
    cotangent.Fill(random);
  }
  const Part part;
  Tensor logits, cotangent, plan, gradient;
  Problem problem;
  const cuda::Family* family = nullptr;
  std::unique_ptr<Bytes> workspace;
  std::unique_ptr<cuda::Resident> resident;
};

Recipe RecipeOf(const std::string& name) {
  if (name == "guarded") {
    Recipe recipe = DeepSeekRecipe();
    recipe.guard_value = 1e-4;
    return recipe;
  }
  return name == "exp" ? ExpColumnRowRecipe() : name == "deepseek" ? DeepSeekRecipe() : LogRowColumnRecipe();
}

void Prepare(const Row& row, const std::string& kind, const DeviceInfo& device, Work* work) {
  Problem& problem = work->problem;
  problem = Problem();
  problem.count = work->part.count;
  problem.n = problem.m = work->part.side;
  problem.normalization.logits = work->logits.view();
  problem.normalization.recipe = RecipeOf(absl::GetFlag(FLAGS_recipe));
  problem.solver.max_iterations = row.iterations;
  problem.outputs.plan = work->plan.output();
  if (kind != "forward") {
    problem.normalization.cotangent = work->cotangent.view();
    problem.normalization.backward = kind == "unrolled" ? BackwardMode::kUnrolled : BackwardMode::kImplicit;
    problem.outputs.gradient_logits = work->gradient.output();
  }
  work->family = nullptr;
  for (const cuda::Family* family : {cuda::RegisterNormalization(), cuda::OnChipNormalization()}) {
    if (work->family == nullptr && family->Takes(device, problem)) work->family = family;
  }
  work->workspace.reset();
  work->workspace = std::make_unique<Bytes>(work->family->WorkspaceBytes(device, problem));
  work->resident = work->family->Make(problem, work->workspace->data);
}

// Enqueues a slice of all that are not done.
void Launch(const std::vector<std::unique_ptr<Work>>& works, Context* context) {
  for (const cuda::Family* family : {cuda::RegisterNormalization(), cuda::OnChipNormalization()}) {
    std::vector<cuda::Resident*> residents;
    for (const auto& work : works) {
      if (work->family == family && !work->resident->done()) residents.push_back(work->resident.get());
    }
    if (residents.empty()) continue;
    const absl::Status status = family->Launch(residents, 1, context);
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", status.ToString().c_str());
      std::exit(1);
    }
  }
}

// Solves to the end. Returns the number of slices.
int Solve(const std::vector<std::unique_ptr<Work>>& works, Context* context) {
  for (int slices = 1;; ++slices) {
    Launch(works, context);
    Check(cudaStreamSynchronize(context->stream()), "solving");
    bool done = true;
    for (const auto& work : works) {
      if (work->resident->done()) continue;
      cuda::Resident* resident = work->resident.get();
      work->family->Collect({&resident, 1});
      done &= resident->done();
      if (resident->done() && !resident->status().ok()) {
        std::fprintf(stderr, "%s\n", resident->status().ToString().c_str());
        std::exit(1);
      }
    }
    context->Reset();
    if (done) return slices;
  }
}

double Largest(const oracle::Vector& x) {
  double largest = 0;
  for (double value : x) largest = std::max(largest, std::abs(value));
  return largest;
}

// dL/dlogits of the implicit mode for a P whose rows and columns sum up to about 1 and which is far from a permutation:
// alpha and beta from each other until they stand still. (The oracle's dense solve takes minutes of large matrices.)
oracle::Vector ImplicitBySteps(const oracle::Vector& plan, int64_t n, const oracle::Vector& cotangent) {
  oracle::Vector alpha(n, 0.0), beta(n, 0.0);
  for (int step = 0; step < 200; ++step) {
    double moved = 0;
    oracle::Vector rows(n, 0.0), columns(n, 0.0), row_sums(n, 0.0), column_sums(n, 0.0);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        rows[i] += plan[i * n + j] * (cotangent[i * n + j] - beta[j]);
        row_sums[i] += plan[i * n + j];
      }
      alpha[i] = rows[i] / row_sums[i];
      for (int64_t j = 0; j < n; ++j) {
        columns[j] += plan[i * n + j] * (cotangent[i * n + j] - alpha[i]);
        column_sums[j] += plan[i * n + j];
      }
    }
    for (int64_t j = 0; j < n; ++j) {
      moved = std::max(moved, std::abs(columns[j] / column_sums[j] - beta[j]));
      beta[j] = columns[j] / column_sums[j];
    }
    if (moved < 1e-14) break;
  }
  oracle::Vector gradient(n * n);
  for (int64_t k = 0; k < n * n; ++k) gradient[k] = plan[k] * (cotangent[k] - alpha[k / n] - beta[k % n]);
  return gradient;
}

// Largest error of some members, in units of the largest entry.
double ErrorOf(const Row& row, const std::string& kind, const Work& work) {
  const int64_t side = work.part.side, area = side * side,
                members = std::min<int64_t>(work.part.count, area > 9999   ? 1
                                                             : area > 1024 ? 2
                                                                           : 16);
  double worst = 0;
  for (int64_t k = 0; k < members; ++k) {
    const int64_t member = k * (work.part.count - 1) / std::max<int64_t>(members - 1, 1);
    oracle::Normalization problem;
    problem.n = problem.m = side;
    problem.logits = work.logits.Values(member * area, area);
    problem.recipe = work.problem.normalization.recipe;
    problem.iterations = row.iterations;
    const oracle::Vector plan = oracle::Normalize(problem);
    const auto compare = [&](const Tensor& tensor, const oracle::Vector& expected) {
      const oracle::Vector actual = tensor.Values(member * area, area);
      const double largest = Largest(expected);
      for (int64_t e = 0; e < area; ++e) {
        const double error = std::abs(actual[e] - expected[e]) / largest;
        if (!(error <= worst)) worst = error;  // NaN too.
      }
    };
    compare(work.plan, plan);
    if (kind == "forward") continue;
    const oracle::Vector cotangent = work.cotangent.Values(member * area, area);
    compare(work.gradient, kind == "unrolled" ? oracle::UnrolledGradient(problem, cotangent)
                           : side > 128       ? ImplicitBySteps(plan, side, cotangent)
                                              : oracle::ImplicitGradient(plan, side, side, cotangent));
  }
  return worst;
}

// Median microseconds of a slice among `repeats` in a graph.
double TimeGraph(const std::vector<std::unique_ptr<Work>>& works, Context* context, int repeats, int samples) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  Check(cudaStreamBeginCapture(context->stream(), cudaStreamCaptureModeRelaxed), "capturing");
  for (int k = 0; k < repeats; ++k) {
    for (const auto& work : works) work->resident = work->family->Make(work->problem, work->workspace->data);
    Launch(works, context);
  }
  Check(cudaStreamEndCapture(context->stream(), &graph), "capturing");
  Check(cudaGraphInstantiate(&executable, graph, 0), "a graph");
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "an event");
  Check(cudaEventCreate(&end), "an event");
  std::vector<float> times;
  for (int k = -2; k < samples; ++k) {
    // The replay before keeps the device busy until the timed one has been enqueued.
    Check(cudaGraphLaunch(executable, context->stream()), "a replay");
    Check(cudaEventRecord(begin, context->stream()), "timing");
    Check(cudaGraphLaunch(executable, context->stream()), "a replay");
    Check(cudaEventRecord(end, context->stream()), "timing");
    Check(cudaEventSynchronize(end), "timing");
    float milliseconds = 0;
    Check(cudaEventElapsedTime(&milliseconds, begin, end), "timing");
    if (k >= 0) times.push_back(milliseconds);
  }
  (void)cudaGraphExecDestroy(executable);
  (void)cudaGraphDestroy(graph);
  (void)cudaEventDestroy(begin);
  (void)cudaEventDestroy(end);
  context->Reset();
  std::sort(times.begin(), times.end());
  return 1e3 * times[times.size() / 2] / repeats;
}

// Microseconds of a slice. Graphs of so many slices that the start of one, some microseconds, hardly counts.
double Time(const Row& row, const std::string& kind, const DeviceInfo& device,
            const std::vector<std::unique_ptr<Work>>& works, Context* context) {
  context->timing = true;
  const double guess = TimeGraph(works, context, 4, 3);
  const int repeats = std::clamp(static_cast<int>(2e3 / guess), 1, 200);
  const int samples = std::clamp(static_cast<int>(5e5 * absl::GetFlag(FLAGS_seconds) / (guess * repeats)), 3, 100);
  const double microseconds = TimeGraph(works, context, repeats, samples);
  context->timing = false;
  for (const auto& work : works) Prepare(row, kind, device, work.get());
  return microseconds;
}

void Run(const Row& row, DType dtype, const DeviceInfo& device) {
  Context context(device);
  std::mt19937_64 random(7);
  std::vector<std::unique_ptr<Work>> works;
  for (const Part& part : row.parts) works.push_back(std::make_unique<Work>(part, dtype, &random));
  const std::vector<std::string> kinds = absl::StrSplit(absl::GetFlag(FLAGS_works), ',');
  for (const std::string& kind : kinds) {
    for (const auto& work : works) Prepare(row, kind, device, work.get());
    const int slices = Solve(works, &context);
    double error = 0;
    for (const auto& work : works) {
      const double one = ErrorOf(row, kind, *work);
      if (!(one <= error)) error = one;
    }
    const double microseconds = Time(row, kind, device, works, &context);
    std::printf(
        "{\"row\": \"%s\", \"work\": \"%s\", \"dtype\": \"%s\", \"recipe\": \"%s\", \"us\": %.3f, \"error\": %.3g, "
        "\"slices\": %d, \"family\": \"%s\"}\n",
        row.name.c_str(), kind.c_str(), absl::GetFlag(FLAGS_dtype).c_str(), absl::GetFlag(FLAGS_recipe).c_str(),
        microseconds, error, slices, works[0]->family->name());
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace sinkhorn

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const auto devices = sinkhorn::ListDevices();
  if (!devices.ok() || devices->empty()) {
    std::fprintf(stderr, "no GPU: nothing is timed\n");
    return 2;
  }
  const auto dtype = absl::GetFlag(FLAGS_dtype) == "bfloat16" ? sinkhorn::DType::kBFloat16 : sinkhorn::DType::kFloat32;
  const std::vector<std::string> rows = absl::StrSplit(absl::GetFlag(FLAGS_rows), ',');
  for (const std::string& row : rows) sinkhorn::Run(sinkhorn::ParseRow(row), dtype, (*devices)[0]);
}
