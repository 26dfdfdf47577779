// What a slice enqueues for residents whose Hessian-vector products are under way: in the first their start, pairs of
// sweeps as many as fit, and the products, which blocks store whose directions are done. Those that are done sit out
// what is still enqueued.
#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "kernels/cuda/transport_hessian.h"
#include "kernels/cuda/transport_launches.h"
#include "kernels/cuda/transport_slice.h"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kLaunchesOfPair = 3;

class ProductSlice : private SliceLaunches {
 public:
  ProductSlice(absl::Span<Resident* const> residents, double slice_seconds, LaunchContext* context)
      : SliceLaunches(residents, slice_seconds, context) {}

  absl::Status Run() {
    const Set all = Select([](const TransportResident&) { return true; });
    Start(Among(all, [](const TransportResident& r) { return r.pairs() == 0; }));
    Pairs(all, slice_seconds());
    Store(all);
    Report(all);
    return Enqueue();
  }

 private:
  template <typename Visit>
  void ForEachMode(const Set& among, Visit visit) {
    const auto modes = ByKind<Mode>(among, [](const TransportResident& r, auto add) { AddModes(r, add); });
    for (const auto& [mode, set] : modes) visit(set, mode);
  }

  // Cosines' way to the unit sphere and back.
  void Sphere(const Set& among, bool leaving) {
    const Set set = Among(among, [](const TransportResident& r) { return SphereBlocks(r.job()) > 0; });
    const Table table = TableOf(set, [](const Job& job) { return job.count * SphereBlocks(job); });
    Later(table, [=](const LaunchTable& t, int64_t blocks) { LaunchSphere(t, blocks, leaving, stream()); });
  }

  void Start(const Set& set) {
    Sphere(set, /*leaving=*/false);
    const Table start = TableOf(set, [](const Job& job) { return job.count * ProductStartBlocks(job); });
    Later(start, [=](const LaunchTable& t, int64_t blocks) { LaunchProductStart(t, blocks, stream()); });
    ForEachMode(set, [this](const Set& of_mode, Mode mode) {
      const Table table =
          TableOf(Plain(of_mode, mode), [](const Job& job) { return job.count * ProductSetupBlocks(job); });
      Later(table, [=](const LaunchTable& t, int64_t blocks) { LaunchProductSetup(t, blocks, mode, stream()); });
    });
    const Set bent = Bent(set);
    const Table doubles = TableOf(bent, [](const Job& job) { return job.count * StepDoubleBlocks(job); });
    Later(doubles, [=](const LaunchTable& t, int64_t blocks) { LaunchStepDoubles(t, blocks, stream()); });
    for (const auto& [ranks, chosen] :
         ByKind<int>(bent, [](const TransportResident&r, auto add) { add(BentSetupRanks(r.job())); })) {
      const Table table = TableOf(chosen, [](const Job& job) { return job.count * BentSetupBlocks(job); });
      Later(table, [=, dim = LargestDim(chosen), ranks = ranks](const LaunchTable& t, int64_t blocks) {
        LaunchBentSetup(t, blocks, dim, ranks, stream());
      });
    }
    const Set matrix = WithMatrices(set);
    const Table scales = TableOf(matrix, [](const Job& job) { return job.count * StepScaleBlocks(job); });
    Later(scales, [=](const LaunchTable& t, int64_t blocks) { LaunchStepScale(t, blocks, stream()); });
    const Table splits = TableOf(matrix, [](const Job& job) { return job.count * StepSplitBlocks(job); });
    Later(splits, [=](const LaunchTable& t, int64_t blocks) { LaunchStepSplit(t, blocks, stream()); });
    ForEachMatrixKind(matrix, MatrixSetupBlocks, LaunchMatrixSetup);
  }

  void Store(const Set& set) {
    ForEachMode(set, [this](const Set& of_mode, Mode mode) {
      const Table table =
          TableOf(Plain(of_mode, mode), [](const Job& job) { return job.count * ProductStoreBlocks(job); });
      Later(table, [=](const LaunchTable& t, int64_t blocks) { LaunchProductStore(t, blocks, mode, stream()); });
    });
    for (int side = 0; side < 2; ++side) {
      Weighed(
          Bent(set), side, BentLaunchOf, BentWeightBlocks, BentSumBlocks,
          [=](const LaunchTable& t, int64_t blocks, int dim, int splits, int chunk) {
            LaunchBentWeights(t, blocks, dim, splits, side, chunk, stream());
          },
          [=](const LaunchTable& t, int64_t blocks, int ranks, int chunk) {
            LaunchBentSums(t, blocks, ranks, side, chunk, stream());
          });
    }
    const Set matrix = WithMatrices(set);
    const Table bounds = TableOf(matrix, [](const Job& job) { return job.count * PotentialBoundBlocks(job); });
    Later(bounds, [=](const LaunchTable& t, int64_t blocks) { LaunchPotentialBound(t, blocks, stream()); });
    ForEachMatrixKind(matrix, MatrixStoreBlocks, LaunchMatrixStore);
    Sphere(set, /*leaving=*/true);
  }

  Set Plain(const Set& of_mode, Mode mode) const {
    return Among(of_mode, [mode](const TransportResident& r) {
      return !HasMatrixKernel(r.job(), mode) && !BendsExactly(r.job(), mode);
    });
  }
  Set Bent(const Set& among) const {
    return Among(among, [](const TransportResident& r) {
      bool bent = false;
      AddModes(r, [&](Mode mode) { bent = bent || BendsExactly(r.job(), mode); });
      return bent;
    });
  }
  Set WithMatrices(const Set& among) const {
    return Among(among, [](const TransportResident& r) { return r.Has(kFloat) && HasMatrixKernel(r.job(), kFloat); });
  }
  template <typename BlocksOf, typename Launch>
  void ForEachMatrixKind(const Set& among, BlocksOf blocks_of, Launch launch) {
    const auto kinds = ByKind<std::array<int, 3>>(among, [](const TransportResident& r, auto add) {
      add({PlanesOf(r.job()), CloudRowBytes(r.job().dim), MatrixRanks(r.job())});
    });
    for (const auto& [kind, set] : kinds) {
      const int planes = kind[0], ranks = kind[2], dim = residents()[set[0]]->job().dim;
      const Table table = TableOf(set, [=](const Job& job) { return job.count * blocks_of(job); });
      Later(table, [=](const LaunchTable& t, int64_t blocks) { launch(t, blocks, planes, dim, ranks, stream()); });
    }
  }

  // One kernel's launches: for each side.
  struct SweepTables {
    Mode mode;
    Geometry geometry;
    int planes, dim;  // Of clouds in float32, as below; `dim`: the largest.
    bool alone, hopper;
    Table side[2];
  };
  std::vector<SweepTables> SweepsOf(const Set& among) {
    using Kind =
        std::tuple<Mode, int, int, bool>;  // Planes and parts of clouds in float32; whether coordinates are few.
    const auto kinds = ByKind<Kind>(among, [](const TransportResident& r, auto add) {
      const Job& job = r.job();
      const int planes = PlanesOf(job), parts = static_cast<int>(PartsOf(planes, job.dim));
      AddModes(r, [&](Mode mode) {
        const bool clouds = mode == kFloat, few = mode == kMixed && job.dim <= kFewDims;
        add({mode, clouds ? planes : 0, clouds ? parts : few, job.in.hessian.count == 1});
      });
    });
    std::vector<SweepTables> tables;
    for (const auto& [kind, set] : kinds) {
      const auto [mode, planes, parts, alone] = kind;
      const Job& first = residents()[set[0]]->job();
      SweepTables sweep{mode, SweepGeometry(first, mode), planes, 0, alone, first.hopper, {}};
      for (int k : set) sweep.dim = std::max(sweep.dim, residents()[k]->job().dim);
      for (int side = 0; side < 2; ++side) {
        sweep.side[side] =
            TableOf(set, [mode = mode, side](const Job& job) { return job.count * SweepBlocks(job, mode, side); });
      }
      tables.push_back(sweep);
    }
    return tables;
  }

  void Pairs(const Set& all, double slice_seconds) {
    double seconds = kLaunchesOfPair * kLaunchSeconds;
    for (int k : all) seconds += SweepPairSeconds(residents()[k]->job());
    const auto fitting = static_cast<int64_t>(std::min(1e6, slice_seconds / seconds));
    Set set = all;
    std::vector<int64_t> left(residents().size());
    for (int k : all) {
      left[k] = std::min(std::max<int64_t>(1, fitting), residents()[k]->PairsAllowed());
      residents()[k]->CountPairs(left[k]);
    }
    while (!set.empty()) {
      const std::vector<SweepTables> sweeps = SweepsOf(set);
      const Table steps = TableOf(set, [](const Job& job) { return job.count * ProductStepBlocks(job); });
      int64_t pairs = left[set[0]];
      for (int k : set) pairs = std::min(pairs, left[k]);
      for (int64_t pair = 0; pair < pairs; ++pair) EnqueuePair(sweeps, steps);
      for (int k : set) left[k] -= pairs;
      set.erase(std::remove_if(set.begin(), set.end(), [&](int k) { return left[k] == 0; }), set.end());
    }
  }

  void EnqueuePair(const std::vector<SweepTables>& sweeps, const Table& steps) {
    for (int side = 0; side < 2; ++side) {
      for (const SweepTables& sweep : sweeps) {
        Later(sweep.side[side], [this, s = sweep, side](const LaunchTable& t, int64_t blocks) {
          if (s.geometry == Geometry::kExact) return LaunchExactSweep(t, blocks, s.dim, s.alone, side, stream());
          if (s.geometry == Geometry::kPlain) return LaunchSweep(t, blocks, s.mode, s.alone, side, stream());
          LaunchCloudSweep(t, blocks, s.planes, s.dim, s.alone, s.hopper, side, stream());
        });
      }
    }
    Later(steps, [this](const LaunchTable& t, int64_t blocks) { LaunchProductStep(t, blocks, stream()); });
  }

  void Report(const Set& all) {
    void* address = nullptr;
    auto* reports =
        static_cast<ProductReport*>(context()->HostVisible(residents().size() * sizeof(ProductReport), &address));
    auto* device_reports = static_cast<ProductReport*>(address);
    const Table table = TableOf(all, [](const Job&) { return 1; });
    Later(table, [=](const LaunchTable& t, int64_t) { LaunchProductReport(t, device_reports, stream()); });
    for (size_t k = 0; k < residents().size(); ++k) residents()[k]->ExpectProducts(&reports[k]);
  }
};

}  // namespace

double SweepPairSeconds(const Job& job) {
  double pairs = 0;
  for (int e = 0; e < job.engines; ++e) pairs += 1.0 * EngineSize(job, e, 0) * EngineSize(job, e, 1);
  const double groups = static_cast<double>(CeilDiv(job.in.hessian.count, kSweepTogether));
  if (job.precision == Precision::kDouble) {
    return job.count * (2 * pairs * groups * (3.2e-12 + 3.2e-13 * job.dim) + 2e-8) + 2e-5;
  }
  return job.count * (2 * pairs * groups * (4e-13 + 4e-15 * job.dim * (2 * PlanesOf(job) - 1)) + 2e-8) + 2e-5;
}

double ProductSeconds(const Job& job) {
  const HessianInputs& in = job.in.hessian;
  if (in.count == 0) return 0;
  double pairs = 0;
  for (int e = 0; e < job.engines; ++e) pairs += 1.0 * EngineSize(job, e, 0) * EngineSize(job, e, 1);
  const double slow = job.precision == Precision::kDouble ? 4 : 1;
  const double bent = job.count * in.count * pairs * slow * 6e-13 * job.dim;
  const int terms = in.preconditioner == Preconditioner::kNeumann ? in.neumann_terms : 0;
  return in.max_iterations * (1.0 + terms) * (SweepPairSeconds(job) + kLaunchesOfPair * kLaunchSeconds) + bent + 4e-5;
}

absl::Status LaunchProducts(absl::Span<Resident* const> residents, double slice_seconds, LaunchContext* context) {
  return ProductSlice(residents, slice_seconds, context).Run();
}

}  // namespace cuda
}  // namespace sinkhorn
