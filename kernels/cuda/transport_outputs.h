// What a slice enqueues for transport problems that are through, once their plans are measured: everything that was
// asked for beyond potentials, and, last, what is stored and reported.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_OUTPUTS_H_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_OUTPUTS_H_

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_launches.h"
#include "kernels/cuda/transport_resident.h"

namespace sinkhorn {
namespace cuda {

class OutputLaunches : protected SliceLaunches {
 protected:
  using SliceLaunches::SliceLaunches;

  void MakeOutputs(const Set& set) {
    Apply(set);
    ExactApply(set);
    WeighedDirections(set);
    Linear(set);
    ExactGradients(set);
    KeptGradients(set);
    Gradients(set);
    EvenGradients(set);
    WideGradients(set);
    OtherGradients(set);
    Sparse(Among(set, [](const TransportResident& r) { return r.job().out.sparse_plan.max_entries > 0; }));
    Bound(Among(set, [](const TransportResident& r) { return r.job().wants_bound; }));
  }

  // Stores what is through, and reports on all.
  void End(const Set& preparing, const Set& finishing) {
    void* address = nullptr;
    auto* reports = static_cast<JobReport*>(context()->HostVisible(residents().size() * sizeof(JobReport), &address));
    auto* device_reports = static_cast<JobReport*>(address);
    const Table scalars = TableOf(finishing, [](const Job& job) { return job.count; });
    const Set larger = Among(finishing, [](const TransportResident& r) { return !r.OnChip(); });
    Table vectors;
    if (scalars.blocks < kProcessors || !larger.empty()) {
      vectors = TableOf(finishing, [](const Job& job) { return job.count * StoreBlocks(job); });
    }
    const Table all = TableOf(Select([](const TransportResident&) { return true; }), [](const Job&) { return 1; });
    Later(all, [=](const LaunchTable& t, int64_t) {
      LaunchEnd({At(vectors), At(scalars), t, vectors.blocks, scalars.blocks, device_reports}, stream());
    });
    for (size_t k = 0; k < residents().size(); ++k) {
      const int number = static_cast<int>(k);
      residents()[k]->ExpectReport(&reports[k], std::binary_search(preparing.begin(), preparing.end(), number),
                                   std::binary_search(finishing.begin(), finishing.end(), number));
    }
  }

 private:
  void Apply(const Set& set) {
    using Kind = std::tuple<int, Source, Mode>;
    const auto kinds = ByKind<Kind>(set, [](const TransportResident& r, auto add) {
      for (int side = 0; side < 2; ++side) {
        AddModes(r, [&](Mode mode) {
          if (ApplyBlocks(r.job(), side) > 0) add({side, SourceOf(r.job()), mode});
        });
      }
    });
    for (const auto& [kind, chosen] : kinds) {
      const Table table =
          TableOf(chosen, [side = std::get<0>(kind)](const Job& job) { return job.count * ApplyBlocks(job, side); });
      Later(table, [this, kind = kind](const LaunchTable& t, int64_t blocks) {
        const auto [side, source, mode] = kind;
        LaunchApply(t, blocks, source, mode, side, stream());
      });
    }
  }

  void ExactApply(const Set& set) {
    using Kind = std::tuple<int, Mode, ExactApplyLaunch>;
    const auto kinds = ByKind<Kind>(set, [](const TransportResident& r, auto add) {
      for (int side = 0; side < 2; ++side) {
        const auto add_mode = [&](Mode mode) {
          const ExactApplyLaunch launch = ExactApplyLaunchOf(r.job(), mode, side);
          if (launch.any) add({side, mode, launch});
        };
        // Directions are of members of any mode, in one launch.
        GivesDirections(r.job(), side) ? add_mode(kFloat) : AddModes(r, add_mode);
      }
    });
    for (const auto& [kind, jobs] : kinds) {
      const int side = std::get<0>(kind), dim = LargestDim(jobs);
      const Mode mode = std::get<Mode>(kind);
      const ExactApplyLaunch launch = std::get<ExactApplyLaunch>(kind);
      const Table table = TableOf(jobs, [=](const Job& job) { return ExactApplyBlocks(job, launch, mode, side); });
      Later(table, [=](const LaunchTable& t, int64_t blocks) {
        LaunchExactApply(t, blocks, launch, dim, mode, side, stream());
      });
    }
  }

  void WeighedDirections(const Set& set) {
    for (int side = 0; side < 2; ++side) {
      Weighed(
          set, side, DirectionLaunchOf, DirectionWeightBlocks, DirectionSumBlocks,
          [=](const LaunchTable& t, int64_t blocks, int dim, int splits, int chunk) {
            LaunchDirectionWeights(t, blocks, dim, splits, side, chunk, stream());
          },
          [=](const LaunchTable& t, int64_t blocks, int ranks, int chunk) {
            LaunchDirectionSums(t, blocks, ranks, side, chunk, stream());
          });
    }
  }

  void ExactGradients(const Set& set) {
    const Set mixed = Among(set, [](const TransportResident& r) { return r.Has(kMixed); });
    const Table table = TableOf(
        mixed, [](const Job& job) { return job.count * (ExactGradientBlocks(job, 0) + ExactGradientBlocks(job, 1)); });
    Later(table, [this](const LaunchTable& t, int64_t blocks) { LaunchExactGradient(t, blocks, stream()); });
  }

  void KeptGradients(const Set& set) {
    using Kind = std::tuple<int, bool, Sides, int>;
    const auto kinds = ByKind<Kind>(set, [](const TransportResident& r, auto add) {
      const Job& job = r.job();
      if (!r.HasKeptGradient(kFloat) && !r.HasKeptGradient(kMixed)) return;
      for (int side = 0; side < 2; ++side) {
        const GradientLaunch launch = KeptGradientLaunchOf(job, side);
        if (launch.sides == Sides::kNone) continue;
        add({PlanesOf(job), KeepsDensities(job), launch.sides, launch.ranks});
      }
    });
    for (const auto& [kind, jobs] : kinds) {
      const int planes = std::get<0>(kind);
      const bool densities = std::get<bool>(kind);
      const GradientLaunch launch = {std::get<Sides>(kind), std::get<3>(kind)};
      const Table table = TableOf(jobs, [&](const Job& job) { return KeptGradientBlocks(job, launch); });
      Later(table, [=](const LaunchTable& t, int64_t blocks) {
        LaunchKeptGradient(t, blocks, planes, densities, launch, stream());
      });
    }
  }

  void Gradients(const Set& set) {
    using Kind = std::tuple<int, Parts, int, Sides, int>;
    const auto kinds = ByKind<Kind>(set, [](const TransportResident& r, auto add) {
      const Job& job = r.job();
      if (!r.Has(kFloat) || !HasGradientKernel(job, kFloat) || r.HasKeptGradient(kFloat)) return;
      const int planes = PlanesOf(job);
      for (int side = 0; side < 2; ++side) {
        const GradientLaunch launch = GradientLaunchOf(job, side);
        if (launch.sides == Sides::kNone) continue;
        add({planes, PartsOf(planes, job.dim), CloudRowBytes(job.dim), launch.sides, launch.ranks});
      }
    });
    for (const auto& [kind, jobs] : kinds) {
      const int planes = std::get<0>(kind);
      GradientLaunch launch = {std::get<Sides>(kind), std::get<4>(kind)};
      int cuts = GradientCuts(residents()[jobs[0]]->job(), launch);
      int64_t blocks_uncut = 0;
      for (int k : jobs) {
        const Job& job = residents()[k]->job();
        blocks_uncut += GradientBlocks(job, launch);
        if (GradientCuts(job, launch) != cuts) cuts = 1;
      }
      if (blocks_uncut * cuts <= kProcessors) launch.cuts = cuts;
      const int dim = LargestDim(jobs);
      const Table table = TableOf(jobs, [&](const Job& job) { return GradientBlocks(job, launch); });
      Later(table,
            [=](const LaunchTable& t, int64_t blocks) { LaunchGradient(t, blocks, planes, dim, launch, stream()); });
    }
  }

  void EvenGradients(const Set& set) {
    using Kind = std::pair<int, int>;
    const auto kinds = ByKind<Kind>(set, [](const TransportResident& r, auto add) {
      const Job& job = r.job();
      if (r.Has(kFloat) && HasEvenGradient(job)) add({PlanesOf(job), CloudRowBytes(job.dim)});
    });
    for (const auto& [kind, jobs] : kinds) {
      const int planes = kind.first, dim = LargestDim(jobs);
      Later(TableOf(jobs, EvenGradientBlocks),
            [=](const LaunchTable& t, int64_t blocks) { LaunchEvenGradient(t, blocks, planes, dim, stream()); });
    }
  }

  void WideGradients(const Set& set) {
    using Kind = std::array<int, 5>;
    const auto kinds = ByKind<Kind>(set, [](const TransportResident& r, auto add) {
      const Job& job = r.job();
      if (!r.Has(kFloat) || !HasGradientKernel(job, kFloat) || !HasWideGradient(job) || r.HasKeptGradient(kFloat))
        return;
      for (int side = 0; side < 2; ++side) {
        if (!MakesMeans(job, side)) continue;
        const WideLaunch launch = WideLaunchOf(job, side);
        const int planes = PlanesOf(job), parts = static_cast<int>(PartsOf(planes, job.dim));
        add({side, planes, parts, launch.splits, launch.ranks});
      }
    });
    for (const auto& [kind, jobs] : kinds) {
      const auto [side, planes, parts, splits, ranks] = kind;
      const int dim = LargestDim(jobs);
      int chunks = 0;
      for (int k : jobs) chunks = std::max(chunks, WideChunks(residents()[k]->job(), side));
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const Table densities = TableOf(jobs, [=, side = side, splits = splits](const Job& job) {
          return DensityBlocks(job, splits, side, chunk);
        });
        Later(densities, [=, side = side, planes = planes, splits = splits](const LaunchTable& t, int64_t blocks) {
          LaunchDensities(t, blocks, planes, dim, splits, side, chunk, stream());
        });
        const Table means = TableOf(
            jobs, [=, side = side, ranks = ranks](const Job& job) { return WideBlocks(job, ranks, side, chunk); });
        Later(means, [=, side = side, planes = planes, ranks = ranks](const LaunchTable& t, int64_t blocks) {
          LaunchWideGradient(t, blocks, planes, ranks, side, chunk, stream());
        });
      }
    }
  }

  // Of costs that are no squared distances, after all others.
  void OtherGradients(const Set& set) {
    for (int side = 0; side < 2; ++side) {
      const Set chosen = Among(set, [side](const TransportResident& r) { return DirectionBlocks(r.job(), side) > 0; });
      const Table table = TableOf(chosen, [side](const Job& job) { return job.count * DirectionBlocks(job, side); });
      Later(table, [=](const LaunchTable& t, int64_t blocks) { LaunchDirections(t, blocks, side, stream()); });
    }
    const Set turned = Among(set, [](const TransportResident& r) { return TurnBlocks(r.job()) > 0; });
    const Table table = TableOf(turned, [](const Job& job) { return job.count * TurnBlocks(job); });
    Later(table, [=](const LaunchTable& t, int64_t blocks) { LaunchTurn(t, blocks, stream()); });
  }

  void Linear(const Set& set) {
    using Kind = std::pair<Exact, Mode>;
    const auto kinds = ByKind<Kind>(set, [](const TransportResident& r, auto add) {
      const Exact exact = HasExactCosts(r.job()) ? ExactOf(r.job()) : Exact::kNone;
      if (LinearBlocks(r.job()) == 0) return;
      // Exact ones are of members of any mode, in one launch.
      exact == Exact::kNone ? AddModes(r, [&](Mode mode) { add({exact, mode}); }) : add({exact, kFloat});
    });
    for (const auto& [kind, chosen] : kinds) {
      const Table table = TableOf(chosen, [](const Job& job) { return job.count * LinearBlocks(job); });
      Later(table, [this, kind = kind, dim = LargestDim(chosen)](const LaunchTable& t, int64_t blocks) {
        LaunchLinear(t, blocks, kind.first, dim, kind.second, stream());
      });
    }
  }

  // Entries are counted, placed, stored.
  void Sparse(const Set& set) {
    using Kind = std::pair<Source, Mode>;
    const auto kinds = ByKind<Kind>(set, [](const TransportResident& r, auto add) {
      AddModes(r, [&](Mode mode) { add({SourceOf(r.job()), mode}); });
    });
    for (bool storing : {false, true}) {
      for (const auto& [kind, chosen] : kinds) {
        const Table table = TableOf(chosen, [](const Job& job) { return job.count * SparseBlocks(job); });
        Later(table, [=, kind = kind](const LaunchTable& t, int64_t blocks) {
          LaunchSparse(t, blocks, kind.first, kind.second, storing, stream());
        });
      }
      if (storing) continue;
      const Table places = TableOf(set, [](const Job& job) { return job.count; });
      Later(places, [=](const LaunchTable& t, int64_t blocks) { LaunchSparsePlaces(t, blocks, stream()); });
    }
  }

  // A start, three passes for sums, and the value; scalars add it up.
  void Bound(const Set& set) {
    using Kind = std::pair<Source, Exact>;
    const auto kinds = ByKind<Kind>(set, [](const TransportResident& r, auto add) {
      add({SourceOf(r.job()), ExactOf(r.job())});
    });
    for (const auto& [kind, chosen] : kinds) {
      const auto [source, exact] = kind;
      const int dim = LargestDim(chosen);
      const Table start = TableOf(chosen, [](const Job& job) { return job.count * BoundStartBlocks(job); });
      Later(start, [=](const LaunchTable& t, int64_t blocks) { LaunchBoundStart(t, blocks, stream()); });
      for (int step = 0; step < 3; ++step) {
        const Table pass = TableOf(chosen, [step](const Job& job) { return job.count * BoundStepBlocks(job, step); });
        Later(pass, [=, source = source, exact = exact](const LaunchTable& t, int64_t blocks) {
          LaunchBoundStep(t, blocks, source, exact, dim, step, stream());
        });
      }
      const Table value = TableOf(chosen, [](const Job& job) { return job.count * BoundBlocks(job); });
      Later(value, [=, source = source, exact = exact](const LaunchTable& t, int64_t blocks) {
        LaunchBoundValue(t, blocks, source, exact, dim, stream());
      });
    }
  }
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_OUTPUTS_H_
