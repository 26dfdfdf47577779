// Solves problems of many shapes with every option, one at a time, on one GPU: what stands out against its neighbours,
// or against what was predicted, is a cliff that the tables' rows do not show.
//
//   gpu_shapes [--kind=transport|normalization] [--shapes=1x900x900x64,...] [--options="dense tol,..."]
//
// A line of JSON for each: milliseconds (the least of three, by the host's clock, from the first launch to the last
// Collect, tensors on the device), iterations, the prediction, slices. Answers are not looked at: tests/conformance
// does that. A transport shape is problems x n x m x coordinates, a normalisation's matrices x rows x columns.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "kernels/cuda/family.h"
#include "tests/bench/gpu_check.h"
#include "tests/bench/gpu_transport_solve.h"

ABSL_FLAG(std::string, kind, "transport", "transport or normalization.");
ABSL_FLAG(double, seconds, 100, "No problem begins later.");
ABSL_FLAG(std::vector<std::string>, shapes, {}, "Instead of all.");
ABSL_FLAG(std::vector<std::string>, options, {}, "Instead of all.");

namespace sinkhorn {
namespace {

struct Shape {
  int64_t count, n, m, dim;
};

// Tensors of a problem at a time: inputs are all read from the same uniform numbers, each from another place.
class Tensors {
 public:
  Tensors() : numbers_(Uniform()), outputs_(kOutputBytes) {}
  void Reset() { input_ = output_ = 0, masses_.clear(); }
  TensorView Input(int64_t size) { return {DType::kFloat32, Take(numbers_, kInputBytes, size * 4, &input_), false}; }
  OutputView Output(int64_t size) { return {DType::kFloat32, Room(size * 4)}; }
  void* Room(int64_t bytes) { return Take(outputs_, kOutputBytes, bytes, &output_); }
  // Of total 1, in ratios up to 2; of all members.
  TensorView Masses(int64_t size) {
    std::vector<float> masses(size);
    double total = 0;
    for (int64_t k = 0; k < size; ++k) total += masses[k] = 1 + static_cast<float>(k * 7919 % 13) / 13;
    for (float& mass : masses) mass /= static_cast<float>(total);
    masses_.push_back(std::make_unique<DeviceBuffer>(masses));
    return {DType::kFloat32, masses_.back()->data(), true};
  }

 private:
  static constexpr size_t kInputBytes = size_t{1} << 30, kOutputBytes = size_t{12} << 30;

  static std::vector<float> Uniform() {
    std::mt19937 random(3);
    std::uniform_real_distribution<float> uniform(0, 1);
    std::vector<float> numbers(kInputBytes / sizeof(float));
    constexpr size_t kDrawn = 1 << 22;
    for (size_t k = 0; k < numbers.size(); ++k) {
      numbers[k] = k < kDrawn ? uniform(random) : numbers[(k - kDrawn) / kDrawn * kDrawn + (k + 12345) % kDrawn];
    }
    return numbers;
  }
  static void* Take(const DeviceBuffer& from, size_t room, size_t bytes, size_t* used) {
    const size_t at = *used;
    *used += (bytes + 255) / 256 * 256;
    if (*used > room) std::fprintf(stderr, "no room for a tensor\n"), std::exit(1);
    return static_cast<char*>(from.data()) + at;
  }

  DeviceBuffer numbers_, outputs_;
  std::vector<std::unique_ptr<DeviceBuffer>> masses_;
  size_t input_ = 0, output_ = 0;
};

// The words of an option.
class Words {
 public:
  explicit Words(const std::string& option) : words_(absl::StrSplit(option, ' ')) {}
  bool Has(absl::string_view word) const { return std::find(words_.begin(), words_.end(), word) != words_.end(); }

 private:
  const std::vector<std::string> words_;
};

constexpr char kTransportOptions[] =
    "base,it1,it100,tol,rho,semi,sym,debias,anneal,gradients,gradient_x,masses,plan,sums,linear,primal,sparse,"
    "products,wide products,projections,hessian,hessian4,euclidean,cosine,dot,fast,given,started,dense,dense rho,"
    "dense tol,dense cost,dense sym,dense plan,dense small tol,rho gradients,debias rho,debias gradients,tol gradients,"
    "tol rho,euclidean gradients,small tol,fast tol,fast gradients,fast rho,double";

Problem TransportOf(const Shape& s, const Words& of, Tensors* tensors) {
  const int64_t rows = s.count * s.n, columns = s.count * s.m, pairs = rows * s.m;
  Problem p;
  p.kind = of.Has("dense") ? ProblemKind::kDense : ProblemKind::kPointCloud;
  p.count = s.count, p.n = s.n, p.m = s.m, p.dim = of.Has("dense") ? 0 : s.dim;
  TransportInputs& in = p.transport;
  SolverOptions& solver = p.solver;
  Outputs& out = p.outputs;
  solver.epsilon = 0.1 * (p.dim > 16 ? p.dim / 16.0 : 1) * (of.Has("small") ? 0.05 : 1);
  solver.max_iterations = of.Has("it1") ? 1 : of.Has("it100") ? 100 : of.Has("tol") ? 300 : 20;
  if (of.Has("tol")) solver.tolerance = 1e-5;
  if (of.Has("rho") || of.Has("semi")) solver.rho_a = 1;
  if (of.Has("rho")) solver.rho_b = 1;
  if (of.Has("sym")) solver.update_rule = UpdateRule::kSymmetric;
  if (of.Has("anneal")) solver.epsilon_decay = 0.5;
  if (of.Has("fast")) solver.precision = Precision::kFast;
  if (of.Has("double")) solver.precision = Precision::kDouble;
  if (of.Has("euclidean")) in.point_cost = PointCost::kEuclidean;
  if (of.Has("cosine")) in.point_cost = PointCost::kCosine;
  if (of.Has("dot")) in.point_cost = PointCost::kNegativeDot;
  if (of.Has("dense")) {
    in.cost = tensors->Input(pairs);
  } else {
    in.x = tensors->Input(rows * s.dim);
    in.y = tensors->Input(columns * s.dim);
  }
  if (of.Has("given")) in.a = tensors->Masses(s.n), in.b = tensors->Masses(s.m);
  if (of.Has("started")) in.initial_f = tensors->Input(rows), in.initial_g = tensors->Input(columns);

  const auto scalars = [&] { return static_cast<double*>(tensors->Room(s.count * 8)); };
  out.value = scalars();
  out.f = tensors->Output(rows);
  out.g = tensors->Output(columns);
  if (of.Has("debias")) {
    solver.debias = true;
    out.f_aa = tensors->Output(rows);
    out.g_bb = tensors->Output(columns);
  }
  if (of.Has("gradients") || of.Has("gradient_x")) out.gradient_x = tensors->Output(rows * s.dim);
  if (of.Has("gradients")) out.gradient_y = tensors->Output(columns * s.dim);
  if (of.Has("masses")) out.gradient_a = tensors->Output(rows), out.gradient_b = tensors->Output(columns);
  if (of.Has("cost")) out.gradient_cost = tensors->Output(pairs);
  if (of.Has("plan")) out.plan = tensors->Output(pairs);
  if (of.Has("sums")) out.row_sums = tensors->Output(rows), out.column_sums = tensors->Output(columns);
  if (of.Has("linear")) out.value_linear = scalars();
  if (of.Has("primal")) out.primal_bound = scalars(), out.dual_bound = scalars();
  if (of.Has("projections")) {
    out.projection_x = tensors->Output(rows * s.dim);
    out.projection_y = tensors->Output(columns * s.dim);
  }
  if (of.Has("sparse")) {
    SparseOutput& sparse = out.sparse_plan;
    sparse.threshold = 0.5 / static_cast<double>(s.n * s.m);
    sparse.max_entries = s.n * s.m;
    sparse.row_offsets = static_cast<int64_t*>(tensors->Room(s.count * (s.n + 1) * 8));
    sparse.columns = static_cast<int32_t*>(tensors->Room(pairs * 4));
    sparse.values = tensors->Output(pairs);
    sparse.mass = scalars();
  }
  if (of.Has("products")) {
    const int width = of.Has("wide") ? 64 : 4;
    in.v = tensors->Input(columns * width), in.u = tensors->Input(rows * width);
    in.v_columns = in.u_columns = width;
    out.plan_v = tensors->Output(rows * width), out.plan_transpose_u = tensors->Output(columns * width);
  }
  if (of.Has("hessian") || of.Has("hessian4")) {
    HessianInputs& hessian = in.hessian;
    hessian.count = of.Has("hessian4") ? 4 : 1;
    hessian.max_iterations = 20;
    hessian.x = tensors->Input(rows * s.dim * hessian.count);
    out.hessian_x = tensors->Output(rows * s.dim * hessian.count);
    out.hessian_y = tensors->Output(columns * s.dim * hessian.count);
  }
  return p;
}

constexpr char kNormalizationOptions[] =
    "log,log unrolled,log implicit,log unit,log full,log tol,log marginals,log marginals unrolled,"
    "log marginals implicit,log bin,log bin unrolled,log bin implicit,exp,exp unrolled,exp implicit,deepseek,"
    "deepseek unrolled,deepseek implicit,guarded,guarded unrolled,exact,exact implicit,log double,"
    "log double unrolled,log double implicit,exact double";

Problem NormalizationOf(const Shape& s, const Words& of, Tensors* tensors) {
  Problem p;
  p.kind = ProblemKind::kNormalization;
  p.count = s.count, p.n = s.n, p.m = s.m;
  NormalizationInputs& in = p.normalization;
  const bool exact = of.Has("exact"), deepseek = of.Has("deepseek") || of.Has("guarded");
  in.recipe = exact           ? ExactRecipe()
              : of.Has("exp") ? ExpColumnRowRecipe()
              : deepseek      ? DeepSeekRecipe()
                              : LogRowColumnRecipe();
  if (of.Has("guarded")) in.recipe.guard_value = 1e-4;
  p.solver.max_iterations = exact || of.Has("tol") ? 300 : 20;
  if (exact || of.Has("tol")) p.solver.tolerance = 1e-5;
  if (of.Has("double")) p.solver.precision = Precision::kDouble;
  in.logits = tensors->Input(s.count * s.n * s.m);
  if (of.Has("marginals")) in.row_marginals = tensors->Masses(s.n), in.column_marginals = tensors->Masses(s.m);
  const int64_t bin = of.Has("bin") ? 1 : 0, entries = s.count * (s.n + bin) * (s.m + bin);
  if (bin == 1) in.dustbin_score = tensors->Input(s.count);
  p.outputs.plan = tensors->Output(entries);
  in.backward = of.Has("unrolled")   ? BackwardMode::kUnrolled
                : of.Has("implicit") ? BackwardMode::kImplicit
                : of.Has("unit")     ? BackwardMode::kImplicitUnit
                                     : BackwardMode::kImplicitFull;
  if (of.Has("unrolled") || of.Has("implicit") || of.Has("unit") || of.Has("full")) {
    in.cotangent = tensors->Input(entries);
    p.outputs.gradient_logits = tensors->Output(s.count * s.n * s.m);
    if (bin == 1) p.outputs.gradient_dustbin_score = tensors->Output(s.count);
  }
  return p;
}

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void Measure(const Shape& s, const std::string& option, const Problem& problem, Context* context) {
  const cuda::Family* family = nullptr;
  for (const cuda::Family* f : {cuda::RegisterNormalization(), cuda::OnChipNormalization(), cuda::Transport()}) {
    if (family == nullptr && f->Takes(context->device(), problem)) family = f;
  }
  const int64_t bytes = family->WorkspaceBytes(context->device(), problem);
  const DeviceBuffer workspace(bytes);
  constexpr int kRepeats = 3;
  constexpr double kLong = 0.3, kSlice = 0.05;  // Seconds.
  double least = 1e9;
  int slices = 0;
  SolveReport report;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const std::unique_ptr<cuda::Resident> resident = family->Make(problem, workspace.data());
    cuda::Resident* const one = resident.get();
    Check(cudaDeviceSynchronize(), "before");
    const auto start = std::chrono::steady_clock::now();
    for (slices = 0; !one->done(); ++slices) {
      const absl::Status status = family->Launch({&one, 1}, kSlice, context);
      if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str()), std::exit(1);
      Check(cudaStreamSynchronize(context->stream()), "a slice");
      family->Collect({&one, 1});
      context->Rewind();
    }
    least = std::min(least, SecondsSince(start));
    report = one->report();
    if (least > kLong) break;
  }
  const double predicted = family->PredictedSeconds(context->device(), problem);
  std::printf(
      "{\"count\": %ld, \"n\": %ld, \"m\": %ld, \"dim\": %ld, \"options\": \"%s\", \"ms\": %.4f, \"iterations\": %d, "
      "\"predicted_ms\": %.4f, \"slices\": %d, \"family\": \"%s\", \"workspace_mb\": %.1f}\n",
      s.count, s.n, s.m, s.dim, option.c_str(), least * 1e3, report.convergence.iterations, predicted * 1e3, slices,
      report.family, static_cast<double>(bytes) / 1e6);
  std::fflush(stdout);
}

// All shapes: of one problem and of many, square, tall and wide, on either side of where kernels change.
std::vector<Shape> TransportShapes() {
  std::vector<Shape> shapes;
  for (int64_t dim : {3, 64, 128}) {
    for (int64_t n : {64, 300, 700, 1000, 1100, 2000, 3000, 4000, 6000, 10000, 12000}) shapes.push_back({1, n, n, dim});
  }
  for (int64_t dim : {3, 64}) {
    for (int64_t n : {20, 64, 130, 300, 600, 1000, 1500}) shapes.push_back({64, n, n, dim});
    for (const auto& [n, m] : {std::pair<int64_t, int64_t>{10, 5000}, {100, 20000}, {1000, 5000}, {300, 900}}) {
      shapes.push_back({1, n, m, dim});
      shapes.push_back({1, m, n, dim});
    }
  }
  return shapes;
}
std::vector<Shape> NormalizationShapes() {
  constexpr int64_t kEntries = 8000000;  // Of many matrices.
  std::vector<Shape> shapes;
  const auto add = [&](int64_t n, int64_t m) {
    for (int64_t count : {int64_t{1}, std::max<int64_t>(1, kEntries / (n * m))}) shapes.push_back({count, n, m, 0});
  };
  for (int64_t n : {4, 5, 8, 16, 20, 32, 33, 48, 64, 65, 100, 128, 200, 256, 300, 512, 700, 1000, 1024, 1200, 2000}) {
    add(n, n);
  }
  for (const auto& [n, m] :
       {std::pair<int64_t, int64_t>{4, 64}, {8, 256}, {32, 1000}, {100, 300}, {64, 2000}, {10, 20}}) {
    add(n, m);
    add(m, n);
  }
  return shapes;
}
// What would take more memory or time than it is worth.
bool LeavesOut(const Shape& s, const Words& of) {
  const int64_t pairs = s.n * s.m;
  const bool entries = of.Has("plan") || of.Has("sparse") || of.Has("cost") || of.Has("dense");
  return (entries && s.count * pairs > 100000000) || (of.Has("double") && s.dim > 0 && pairs > 1 << 22) ||
         ((of.Has("hessian") || of.Has("hessian4")) && pairs > 40000000);
}

Shape ParseShape(const std::string& text) {
  const std::vector<std::string> words = absl::StrSplit(text, 'x');
  int64_t numbers[4] = {0, 0, 0, 0};
  bool right = words.size() == 3 || words.size() == 4;
  for (size_t k = 0; k < words.size() && right; ++k) right = absl::SimpleAtoi(words[k], &numbers[k]) && numbers[k] > 0;
  if (!right) std::fprintf(stderr, "not a shape: %s\n", text.c_str()), std::exit(1);
  return {numbers[0], numbers[1], numbers[2], numbers[3]};
}

int Main() {
  Context context(FirstDevice());
  Tensors tensors;
  const bool transport = absl::GetFlag(FLAGS_kind) == "transport";
  std::vector<Shape> shapes = transport ? TransportShapes() : NormalizationShapes();
  std::vector<std::string> options = absl::StrSplit(transport ? kTransportOptions : kNormalizationOptions, ',');
  if (const auto chosen = absl::GetFlag(FLAGS_shapes); !chosen.empty()) {
    shapes.clear();
    for (const std::string& text : chosen) shapes.push_back(ParseShape(text));
  }
  if (const auto chosen = absl::GetFlag(FLAGS_options); !chosen.empty()) options = chosen;
  const auto start = std::chrono::steady_clock::now();
  for (const Shape& shape : shapes) {
    for (const std::string& option : options) {
      const Words of(option);
      if (LeavesOut(shape, of)) continue;
      if (SecondsSince(start) > absl::GetFlag(FLAGS_seconds)) return 0;
      tensors.Reset();
      const Problem problem = transport ? TransportOf(shape, of, &tensors) : NormalizationOf(shape, of, &tensors);
      Measure(shape, option, problem, &context);
    }
  }
  return 0;
}

}  // namespace
}  // namespace sinkhorn

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return sinkhorn::Main();
}
