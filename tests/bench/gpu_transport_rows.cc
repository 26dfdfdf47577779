#include "tests/bench/gpu_transport_rows.h"

#include <cstdio>
#include <functional>
#include <utility>

namespace sinkhorn {
namespace {

// Takes a row, as `set` makes it of the defaults, if it was asked for.
using Add = std::function<void(const char* name, const std::function<void(Row*)>& set)>;

constexpr PointCost kCosts[] = {PointCost::kSquaredEuclidean, PointCost::kEuclidean, PointCost::kCosine,
                                PointCost::kNegativeDot};

// Issue 4, shows 3.
void AddDense(const Add& add) {
  add("dense 128", [](Row* r) { r->dense = true, r->count = 1024, r->n = r->m = 128, r->iterations = 50; });
  add("dense 512", [](Row* r) { r->dense = true, r->count = 64, r->n = r->m = 512, r->iterations = 50; });
  add("dense 16384",
      [](Row* r) { r->dense = true, r->n = r->m = 16384, r->iterations = 10, r->repeats = 3, r->check = false; });
}

// Issue 5, shows 2.
void AddClouds(const Add& add) {
  const int64_t sizes[][2] = {{1024, 64},   {4096, 64},   {10000, 64}, {50000, 64}, {10000, 3},
                              {10000, 128}, {10000, 512}, {4096, 784}, {1000, 64}};
  for (const auto& [n, dim] : sizes) {
    for (Precision precision : {Precision::kStrict, Precision::kFast}) {
      add("cloud", [&](Row* r) {
        r->n = r->m = n, r->dim = dim, r->precision = precision, r->check = n <= 10000;
        r->repeats = n > 10000 ? 3 : 10;
      });
    }
    add("cloud gradient", [&](Row* r) {
      r->n = r->m = n, r->dim = dim, r->gradient = true, r->check = n <= 4096 && dim <= 128;
      r->repeats = n > 10000 ? 2 : 5;
    });
    add("cloud symmetric", [&](Row* r) {
      r->n = r->m = n, r->dim = dim, r->symmetric = true, r->check = n <= 4096, r->repeats = n > 10000 ? 2 : 5;
    });
  }
}

// Sizes between those that a cluster solves and those that are swept.
void AddMiddle(const Add& add) {
  for (int64_t n : {1100, 2048, 2800, 4096}) {
    for (int64_t dim : {64, 3}) {
      if (dim == 3 && n % 2048 != 0) continue;
      for (int64_t count : {1, 16}) {
        for (Precision precision : {Precision::kStrict, Precision::kFast}) {
          add("middle", [&](Row* r) {
            r->count = count, r->n = r->m = n, r->dim = dim, r->precision = precision;
            r->iterations = 50, r->repeats = 10;
          });
        }
      }
    }
    add("middle dense", [&](Row* r) { r->dense = true, r->n = n, r->m = 2048, r->iterations = 50, r->repeats = 10; });
  }
}

// Sizes beyond those, whose iterations are one launch all the same.
void AddLooped(const Add& add) {
  for (int64_t n : {5000, 7500, 10000}) {
    for (int64_t dim : {64, 16, 3}) {
      for (Precision precision : {Precision::kStrict, Precision::kFast}) {
        add("looped", [&](Row* r) {
          r->n = r->m = n, r->dim = dim, r->precision = precision, r->iterations = 50, r->repeats = 5;
        });
      }
    }
    add("looped dense", [&](Row* r) { r->dense = true, r->n = r->m = n, r->iterations = 50, r->repeats = 5; });
  }
}

// And whose densities are made anew in each of them.
void AddMultiplied(const Add& add) {
  for (int64_t n : {14000, 16000, 25000, 33000, 50000}) {
    for (int64_t dim : {48, 3}) {
      add("multiplied",
          [&](Row* r) { r->n = r->m = n, r->dim = dim, r->precision = Precision::kFast, r->repeats = 3; });
    }
  }
}

// Other marginals, and epsilons that want float64.
void AddRelaxedAndSmall(const Add& add) {
  for (int64_t n : {1000, 4096, 10000}) {
    add("relaxed", [&](Row* r) { r->n = r->m = n, r->dim = 64, r->rho = 1, r->repeats = 10; });
  }
  for (const auto& [n, dim] : {std::make_pair(1000, 3), std::make_pair(4096, 3), std::make_pair(4096, 64)}) {
    add("small epsilon", [&](Row* r) {
      r->n = r->m = n, r->dim = dim, r->epsilon = dim == 3 ? 1e-3 : 1e-2, r->iterations = 100, r->repeats = 5;
    });
  }
}

// Shows 3.
void AddBatches(const Add& add) {
  const int64_t batches[][3] = {{256, 64, 64}, {256, 128, 64}, {256, 256, 64}, {64, 512, 64}, {1024, 64, 3}};
  for (const auto& [count, n, dim] : batches) {
    add("batch", [&](Row* r) { r->count = count, r->n = r->m = n, r->dim = dim, r->iterations = 50; });
  }
  const int64_t debiased[][3] = {{1, 1024, 64}, {1, 4096, 64}, {1, 10000, 64}, {1, 4096, 3},  {1, 10000, 3},
                                 {1, 20000, 3}, {1, 50000, 3}, {256, 64, 64},  {64, 512, 64}, {64, 1000, 3}};
  for (const auto& [count, n, dim] : debiased) {
    for (double epsilon : {0.1, 0.0025}) {
      if (epsilon < 0.1 && (dim != 3 || count != 1)) continue;
      add("debiased", [&](Row* r) {
        r->count = count, r->n = r->m = n, r->dim = dim, r->iterations = 50, r->debias = true, r->epsilon = epsilon;
        r->check = n <= 4096, r->repeats = count == 1 ? 5 : 10;
      });
    }
  }
  add("debiased", [](Row* r) {
    r->count = 64, r->n = r->m = 500, r->dim = 3, r->iterations = 1000, r->tolerance = 1e-4, r->debias = true;
    r->epsilon = 0.05, r->check = false;
  });
  // Divergences as they are trained with: epsilon annealed from the clouds' extent to .05^2, all updates symmetric.
  for (const auto& [count, n] :
       {std::pair<int64_t, int64_t>{1, 1000}, {1, 4096}, {1, 10000}, {1, 50000}, {1024, 64}, {64, 1000}}) {
    add("annealed", [&, count = count, n = n](Row* r) {
      r->n = r->m = n, r->dim = 3, r->iterations = 12, r->debias = r->symmetric = r->gradient = true, r->decay = 0.25;
      r->count = count, r->epsilon = 0.0025, r->check = n <= 4096, r->repeats = 5;
    });
  }
  // GeomLoss's own, with half of the costs and as many iterations (gpu_divergence_peer.py).
  for (const auto& [count, n] : {std::pair<int64_t, int64_t>{1, 1000}, {1024, 64}, {64, 1000}, {1, 4096}, {1, 10000}}) {
    add("divergence", [&, count = count, n = n](Row* r) {
      r->n = r->m = n, r->dim = 3, r->iterations = 9, r->debias = r->symmetric = r->gradient = true, r->decay = 0.25;
      r->count = count, r->epsilon = 0.0025, r->kappa = 0.5, r->check = n <= 4096;
    });
  }
  for (const auto& [count, n] :
       {std::pair<int64_t, int64_t>{1, 1000}, {1024, 64}, {1024, 256}, {64, 1000}, {64, 1100}}) {
    for (bool debias : {false, true}) {
      add(debias ? "symmetric to 1e-5, debiased" : "symmetric to 1e-5", [&, count = count, n = n](Row* r) {
        r->count = count, r->n = r->m = n, r->dim = 3, r->iterations = 1000, r->tolerance = 1e-5, r->symmetric = true;
        r->debias = debias, r->epsilon = 0.05, r->check = false, r->repeats = 5;
      });
    }
  }
}

// Shows 4.
void AddConvergence(const Add& add) {
  for (int64_t n : {1000, 10000}) {
    for (double epsilon : {1e-2, 1e-3}) {
      for (bool relaxed : {false, true}) {
        if (n > 1000 && (epsilon < 1e-2 || !relaxed)) continue;  // Minutes.
        add(relaxed ? "to 1e-6" : "to 1e-6 plain", [&](Row* r) {
          r->n = r->m = n, r->dim = 2, r->epsilon = epsilon, r->iterations = 20000, r->tolerance = 1e-6;
          r->over_relaxation = relaxed, r->check = false, r->repeats = n == 1000 ? 5 : 1;
        });
      }
    }
    for (int64_t count : {1, 64}) {
      if (n > 1000 && count > 1) continue;
      add("to 1e-6", [&](Row* r) {
        r->count = count, r->n = r->m = n, r->dim = 64, r->iterations = 20000, r->tolerance = 1e-6;
        r->check = false, r->repeats = n == 1000 ? 5 : 2;
      });
    }
    add("to 1e-6 gradient", [&](Row* r) {
      r->n = r->m = n, r->dim = 64, r->iterations = 20000, r->tolerance = 1e-6, r->gradient = true;
      r->check = false, r->repeats = n == 1000 ? 5 : 2;
    });
    for (bool relaxed : {false, true}) {
      add(relaxed ? "mixtures to 1e-6" : "mixtures to 1e-6 plain", [&](Row* r) {
        r->n = r->m = n, r->dim = 64, r->epsilon = 1, r->iterations = 2000, r->tolerance = 1e-6;
        r->over_relaxation = relaxed, r->mixture = true, r->check = false, r->repeats = n == 1000 ? 5 : 1;
      });
    }
  }
}

// What requests get that leave the tolerance and the number of iterations to the server.
void AddDefaults(const Add& add) {
  const auto row = [&](const char* name, int64_t n, int64_t dim, double epsilon, Precision precision) {
    add(name, [&](Row* r) {
      r->n = r->m = n, r->dim = dim, r->epsilon = epsilon, r->iterations = 1000, r->tolerance = 1e-5;
      r->precision = precision, r->check = false, r->repeats = n < 10000 ? 5 : 2;
      if (std::string(name) == "default relaxed") r->rho = 1;
      r->debias = std::string(name) == "default debiased";
    });
  };
  for (int64_t n : {500, 1000, 2048, 4096, 6000, 10000, 20000}) {
    for (const auto& [dim, epsilon] : {std::make_pair(64, 1e-1), {3, 1e-1}, {3, 1e-2}}) {
      row("default", n, dim, epsilon, Precision::kStrict);
      row("default", n, dim, epsilon, Precision::kFast);
      if (n <= 10000) row("default debiased", n, dim, epsilon, Precision::kStrict);
    }
    if (n <= 10000) row("default relaxed", n, 64, 1e-1, Precision::kStrict);
  }
}

// Shows 5.
void AddMemory(const Add& add) {
  add("million",
      [](Row* r) { r->n = r->m = 1000000, r->dim = 64, r->iterations = 1, r->check = false, r->repeats = 1; });
}

// Every cost of points.
void AddCosts(const Add& add) {
  const int64_t shapes[][3] = {{1, 10000, 64}, {1, 10000, 3}, {256, 64, 64}, {256, 256, 64}, {64, 512, 3}};
  for (const auto& [count, n, dim] : shapes) {
    for (PointCost cost : kCosts) {
      for (bool gradient : {false, true}) {
        add("costs", [&](Row* r) {
          r->count = count, r->n = r->m = n, r->dim = dim, r->cost = cost, r->gradient = gradient, r->repeats = 5;
          r->iterations = n == 10000 ? 10 : 50;
        });
      }
    }
  }
}

// Gradients from exponents that are kept, or from frames: tiles are shared out evenly, or by clusters.
void AddKeptGradients(const Add& add) {
  for (const auto& [n, m] : {std::make_pair(4500, 4130), {1300, 2100}}) {
    for (int64_t dim : {40, 100, 128, 200, 512, 784}) {
      for (Precision precision : {Precision::kStrict, Precision::kFast}) {
        for (double epsilon : {0.01, 0.0003}) {
          add("kept gradient", [&, n = n, m = m](Row* r) {
            r->n = n, r->m = m, r->dim = dim, r->precision = precision, r->repeats = 5;
            r->epsilon = epsilon * dim, r->gradient = true;
          });
        }
      }
    }
  }
}

// Every shape of kernel against float64.
void AddChecks(const Add& add) {
  for (int64_t dim : {1, 3, 16, 17, 32, 33, 64, 65, 100, 128, 200, 512, 784, 1024}) {
    for (Precision precision : {Precision::kStrict, Precision::kFast}) {
      add("checks", [&](Row* r) {
        r->n = 700, r->m = 901, r->dim = dim, r->precision = precision, r->repeats = 1, r->epsilon = 0.01 * dim;
        r->gradient = true;
      });
    }
  }
  // Exponents that are kept; of a small epsilon, whose sums leave the safe range.
  const int64_t kept[][3] = {{1100, 2050, 20},  {2100, 4100, 64},  {1100, 2050, 784},
                             {2100, 4100, 200}, {1030, 8200, 128}, {1100, 14400, 100}};
  for (const auto& [n, m, dim] : kept) {
    for (Precision precision : {Precision::kStrict, Precision::kFast}) {
      for (double epsilon : {0.01, 0.001, 0.0003}) {
        for (double tolerance : {0.0, 1e-3}) {
          add("checks", [&](Row* r) {
            r->n = n, r->m = m, r->dim = dim, r->precision = precision, r->repeats = 1;
            r->epsilon = epsilon * dim, r->tolerance = tolerance, r->iterations = tolerance > 0 ? 300 : 20;
            r->gradient = tolerance == 0;
          });
        }
      }
    }
  }
  // Relaxed marginals of sizes that a whole GPU holds.
  const int64_t held[][3] = {{1100, 2050, 20}, {2100, 4050, 64}, {4000, 4096, 3}, {1300, 1025, 1}, {4200, 1100, 7}};
  for (const auto& [n, m, dim] : held) {
    for (double rho : {0.02, 0.3, 5.0}) {
      for (double epsilon : {0.3, 0.01}) {
        for (double tolerance : {0.0, 1e-4}) {
          add("checks", [&](Row* r) {
            r->n = n, r->m = m, r->dim = dim, r->rho = rho * dim, r->epsilon = epsilon * dim, r->tolerance = tolerance;
            r->iterations = tolerance > 0 ? 300 : 20, r->repeats = 1, r->gradient = tolerance == 0;
          });
        }
      }
    }
  }
  // Symmetric updates and self-terms from such exponents, and from frames.
  const int64_t swept[][3] = {
      {1100, 2050, 20}, {2100, 4100, 64}, {1100, 1200, 784}, {1030, 8200, 128}, {1100, 1200, 3}};
  for (const auto& [n, m, dim] : swept) {
    for (Precision precision : {Precision::kStrict, Precision::kFast}) {
      for (double epsilon : {0.01, 0.001}) {
        for (double tolerance : {0.0, 1e-3}) {
          for (bool debias : {false, true}) {
            add("checks", [&](Row* r) {
              r->n = n, r->m = m, r->dim = dim, r->precision = precision, r->repeats = 1;
              r->epsilon = epsilon * dim, r->tolerance = tolerance, r->iterations = tolerance > 0 ? 300 : 20;
              r->symmetric = !debias, r->debias = debias, r->gradient = tolerance == 0;
            });
          }
        }
      }
    }
  }
  // More than one chunk of densities: of exponents that are not kept.
  for (int64_t dim : {200, 300}) {
    add("checks", [&](Row* r) {
      r->n = 1500, r->m = 1290, r->dim = dim, r->repeats = 1, r->epsilon = 0.01 * dim, r->gradient = true;
      r->iterations = 3;
    });
  }
  const int64_t shapes[][3] = {{3, 64, 50},      {3, 65, 128},    {3, 129, 250},  {3, 300, 257},
                               {3, 17, 500},     {3, 512, 511},   {2, 513, 300},  {1, 2048, 4096},
                               {1, 4000, 16384}, {1, 3000, 1000}, {2, 1500, 2052}};
  for (const auto& [count, n, m] : shapes) {
    for (bool dense : {false, true}) {
      if (!dense && n * m > 1 << 20) continue;
      for (double tolerance : {0.0, 1e-4}) {
        add("checks", [&](Row* r) {
          r->count = count, r->n = n, r->m = m, r->dim = 5, r->dense = dense, r->tolerance = tolerance;
          r->iterations = tolerance > 0 ? 300 : 20, r->repeats = 1;
        });
      }
    }
  }
}

// Little of every kernel, for a sanitizer.
void AddTiny(const Add& add) {
  const auto tiny = [&](const std::function<void(Row*)>& set) {
    add("tiny", [&](Row* r) {
      set(r);
      r->iterations = r->n == 1030 || r->n == 1040 ? 6 : 3, r->check = false, r->repeats = 1;
    });
  };
  for (int64_t dim : {3, 20, 64, 100, 200}) {
    for (Precision precision : {Precision::kStrict, Precision::kFast}) {
      tiny([&](Row* r) { r->n = 600, r->m = 520, r->dim = dim, r->precision = precision, r->gradient = true; });
    }
  }
  for (PointCost cost : kCosts) {
    for (const auto& [n, m] : {std::make_pair(40, 60), std::make_pair(600, 520), std::make_pair(1030, 60)}) {
      tiny([&](Row* r) { r->n = n, r->m = m, r->dim = 5, r->gradient = true, r->cost = cost; });
    }
  }
  for (const auto& [n, m] : {std::make_pair(50, 60), std::make_pair(100, 60), std::make_pair(250, 600)}) {
    for (double tolerance : {0.0, 1e-2}) {
      tiny([&](Row* r) { r->n = n, r->m = m, r->dim = 7, r->tolerance = tolerance, r->debias = true; });
    }
    tiny([&](Row* r) { r->n = n, r->m = m, r->dim = 7, r->symmetric = true; });
  }
  tiny([](Row* r) { r->n = 100, r->m = 120, r->dim = 5, r->tolerance = 1e-3; });
  tiny([](Row* r) { r->n = 530, r->m = 520, r->dim = 2, r->tolerance = 1e-3; });
  // Exponents in float64, on the chip.
  const int64_t exact[][2] = {{60, 41}, {120, 128}, {250, 199}, {400, 512}, {700, 530}};
  for (const auto& [n, m] : exact) {
    for (bool dense : {false, true}) {
      tiny([&](Row* r) { r->n = n, r->m = m, r->dim = 6, r->dense = dense, r->epsilon = 1e-3; });
    }
  }
  // And in memory, in frames.
  for (PointCost cost : kCosts) {
    tiny([&](Row* r) { r->n = 1030, r->m = 1100, r->dim = 3, r->cost = cost, r->epsilon = 1e-3; });
  }
  tiny([](Row* r) { r->dense = true, r->n = 1030, r->m = 1101, r->epsilon = 1e-3; });
  for (double tolerance : {0.0, 1e-5}) {
    tiny([&](Row* r) {
      r->n = 1030, r->m = 1100, r->dim = 40, r->epsilon = 0.02, r->tolerance = tolerance, r->gradient = true;
    });
  }
  // And anew for every half step.
  for (int64_t dim : {3, 20, 70}) {
    for (bool debias : {false, true}) {
      tiny([&](Row* r) {
        r->n = 1030, r->m = 60, r->dim = dim, r->epsilon = 5e-4 * dim, r->debias = debias, r->gradient = true;
        r->tolerance = debias ? 0 : 1e-5;
      });
    }
  }
  for (int64_t n : {60, 120, 250, 400, 2048}) {
    tiny([&](Row* r) { r->dense = true, r->n = n, r->m = n == 2048 ? 1024 : n; });
  }
  // More than the device has at once, one after the other in the same blocks.
  for (bool dense : {false, true}) {
    tiny([&](Row* r) { r->count = 9, r->n = 610, r->m = 520, r->dim = 5, r->dense = dense; });
  }
  // Judged iterations that are held: a thread has four columns, or eight, of rows some of which are read again.
  for (const auto& [n, m] : {std::make_pair(1040, 1100), std::make_pair(1040, 2100), std::make_pair(3400, 3300)}) {
    for (double rho : {0.5, std::numeric_limits<double>::infinity()}) {
      tiny([&](Row* r) { r->n = n, r->m = m, r->dim = 20, r->rho = rho, r->tolerance = 1e-4, r->epsilon = 0.3; });
    }
  }
  // Iterations of a whole device in one launch.
  for (const auto& [m, dim] : {std::make_pair(4300, 3), std::make_pair(8200, 2), std::make_pair(4300, 64)}) {
    for (Precision precision : {Precision::kStrict, Precision::kFast}) {
      for (double tolerance : {0.0, 1e-4}) {
        tiny([&](Row* r) { r->n = 1040, r->m = m, r->dim = dim, r->precision = precision, r->tolerance = tolerance; });
      }
    }
  }
  for (double tolerance : {0.0, 1e-4}) {
    tiny([&](Row* r) { r->dense = true, r->n = 1040, r->m = 4300, r->tolerance = tolerance; });
  }
  for (int64_t m : {14100, 17000, 22000, 26000, 34000, 50000}) {
    tiny([&](Row* r) { r->n = 1040, r->m = m, r->dim = m / 1000, r->precision = Precision::kFast; });
  }
  // Exponents that are kept; gradients whose tiles are shared out evenly.
  const int64_t kept[][2] = {{1100, 20}, {1100, 300}, {8200, 100}, {1800, 1024}, {15200, 60}};
  for (const auto& [m, dim] : kept) {
    for (Precision precision : {Precision::kStrict, Precision::kFast}) {
      add("tiny", [&](Row* r) {
        r->n = 1030, r->m = m, r->dim = dim, r->precision = precision;
        r->iterations = 4, r->check = false, r->repeats = 1, r->gradient = true;
      });
      if (m > 1100) continue;
      for (bool debias : {false, true}) {
        add("tiny", [&](Row* r) {
          r->n = 1030, r->m = m, r->dim = dim, r->precision = precision, r->symmetric = !debias, r->debias = debias;
          r->iterations = 5, r->check = false, r->repeats = 1, r->gradient = true, r->epsilon = 0.005 * dim;
        });
      }
    }
  }
}

}  // namespace

std::vector<Row> RowsOf(const std::string& argument) {
  const size_t slash = argument.find('/');
  const std::string chosen = argument.substr(0, slash);
  long n = 0, dim = 0;
  if (slash != std::string::npos) (void)std::sscanf(argument.c_str() + slash, "/%ld/%ld", &n, &dim);
  std::vector<Row> rows;
  const Add add = [&](const char* name, const std::function<void(Row*)>& set) {
    Row row;
    row.name = name;
    set(&row);
    const bool fits = (n == 0 || row.n == n) && (dim == 0 || row.dim == dim);
    if ((chosen.empty() || chosen == row.name) && fits) rows.push_back(row);
  };
  for (const auto part : {AddDense, AddClouds, AddMiddle, AddLooped, AddMultiplied, AddRelaxedAndSmall, AddBatches,
                          AddConvergence, AddDefaults}) {
    part(add);
  }
  for (const auto& [name, part] : {std::make_pair("costs", AddCosts),
                                   {"checks", AddChecks},
                                   {"kept gradient", AddKeptGradients},
                                   {"tiny", AddTiny}}) {
    if (chosen == name) part(add);
  }
  AddMemory(add);
  return rows;
}

}  // namespace sinkhorn
