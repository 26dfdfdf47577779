// What tensors and problems must be.
#include <cmath>
#include <limits>
#include <string>

#include "tests/server/refused.h"
#include "tests/server/requests.h"

namespace sinkhorn {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

using R = v1::SolveRequest;
using Tensor = v1::Tensor;

}  // namespace

std::vector<Refused> TensorRules() {
  const auto logits = [](const std::function<void(Tensor*)>& change) {
    return [change](R* r) { change(r->mutable_normalization()->mutable_logits()); };
  };
  const auto shape = [logits](const std::vector<int64_t>& extents) {
    return logits([extents](Tensor* t) {
      t->clear_shape();
      for (int64_t extent : extents) t->add_shape(extent);
    });
  };
  const char* const kShape = "normalization.logits.shape";
  const char* const kData = "normalization.logits.data";
  const int64_t kHuge = int64_t{1} << 40;
  return {
      {"dtype_unset", Normalization, logits([](Tensor* t) { t->clear_dtype(); }), "normalization.logits.dtype"},
      {"dtype_unknown", Normalization, logits([](Tensor* t) { t->set_dtype(static_cast<v1::DataType>(99)); }),
       "normalization.logits.dtype"},
      {"empty_tensor", Normalization, logits([](Tensor* t) { t->Clear(); }), "normalization.logits.dtype"},
      {"scalar_matrix", Normalization, shape({}), kShape},
      {"vector_matrix", Normalization, shape({6}), kShape},
      {"extent_zero", Normalization, shape({2, 0}), kShape},
      {"extent_negative", Normalization, shape({-2, -3}), kShape},
      {"extent_most_negative", Normalization, shape({std::numeric_limits<int64_t>::min(), 3}), kShape},
      {"length_short", Normalization, shape({2, 4}), kData},
      {"length_long", Normalization, shape({2, 2}), kData},
      {"length_of_another_dtype", Normalization, logits([](Tensor* t) { t->set_dtype(v1::DATA_TYPE_FLOAT64); }), kData},
      {"no_data", Normalization, logits([](Tensor* t) { t->clear_data(); }), kData},
      {"odd_bytes", Normalization, logits([](Tensor* t) { t->mutable_data()->push_back('x'); }), kData},
      {"product_2_to_80", Normalization, shape({kHuge, kHuge}), kShape, "PROBLEM_TOO_LARGE"},
      // 2^62 elements of 4 bytes: the product of extents fits an int64, the bytes do not.
      {"bytes_2_to_64", Normalization, shape({int64_t{1} << 31, int64_t{1} << 31}), kShape, "PROBLEM_TOO_LARGE"},
      // 2^64 elements wrap to 0.
      {"product_wraps_to_zero", Normalization, shape({int64_t{1} << 32, int64_t{1} << 32}), kShape,
       "PROBLEM_TOO_LARGE"},
      {"large_without_data", Normalization, shape({kHuge, 1}), kData},
      {"rank", Normalization, shape(std::vector<int64_t>(33, 1)), kShape},
      {"nan", Normalization, logits([](Tensor* t) {
         *t = Float32Tensor({2, 3}, {0, 1, kNan, 3, 4, 5});
       }),
       kData},
      {"infinite", Normalization, logits([](Tensor* t) {
         *t = Float32Tensor({2, 3}, {0, 1, 2, 3, 4, -kInf});
       }),
       kData},
      {"nan_float64", Normalization, logits([](Tensor* t) {
         *t = Float64Tensor({1, 2}, {0, std::nan("")});
       }),
       kData},
      {"nan_float16", Normalization, logits([](Tensor* t) {
         *t = Float32Tensor({1, 2}, {0});
         t->set_dtype(v1::DATA_TYPE_FLOAT16);
         t->set_data(std::string("\x00\x3c\x01\x7c", 4));  // 1, NaN.
       }),
       kData},
      {"infinite_bfloat16", Normalization, logits([](Tensor* t) {
         *t = Float32Tensor({1, 2}, {0});
         t->set_dtype(v1::DATA_TYPE_BFLOAT16);
         t->set_data(std::string("\x80\x3f\x80\xff", 4));  // 1, -infinity.
       }),
       kData},
  };
}

std::vector<Refused> NormalizationRules() {
  const auto in = [](const std::function<void(v1::NormalizationProblem*)>& change) {
    return [change](R* r) { change(r->mutable_normalization()); };
  };
  using N = v1::NormalizationProblem;
  const auto custom = [in](const std::function<void(v1::CustomRecipe*)>& change) {
    return in([change](N* n) {
      n->set_recipe(v1::NORMALIZATION_RECIPE_CUSTOM);
      change(n->mutable_custom());
    });
  };
  const auto plan = [in](const std::function<void(N*)>& change) {
    return in([change](N* n) {
      n->clear_logits();
      *n->mutable_plan() = Filled({2, 2}, 0.5f);
      *n->mutable_cotangent() = Filled({2, 2}, 1);
      change(n);
    });
  };
  return {
      {"no_problem", Normalization, [](R* r) { r->clear_problem(); }, "problem"},
      {"no_logits", Normalization, in([](N* n) { n->clear_logits(); }), "normalization.logits"},
      {"unknown_recipe", Normalization, in([](N* n) { n->set_recipe(static_cast<v1::NormalizationRecipe>(77)); }),
       "normalization.recipe"},
      {"custom_without_recipe", Normalization, in([](N* n) { n->mutable_custom(); }), "normalization.custom"},
      {"recipe_without_custom", Normalization, in([](N* n) { n->set_recipe(v1::NORMALIZATION_RECIPE_CUSTOM); }),
       "normalization.custom"},
      {"custom_start", Normalization, custom([](auto* c) { c->set_start(static_cast<v1::NormalizationStart>(9)); }),
       "normalization.custom.start"},
      {"custom_order", Normalization, custom([](auto* c) { c->set_order(static_cast<v1::NormalizationOrder>(9)); }),
       "normalization.custom.order"},
      {"custom_guard", Normalization, custom([](auto* c) { c->set_guard(static_cast<v1::NormalizationGuard>(9)); }),
       "normalization.custom.guard"},
      {"softmax_order", Normalization, custom([](auto* c) {
         c->set_start(v1::NORMALIZATION_START_ROW_SOFTMAX);
         c->set_order(v1::NORMALIZATION_ORDER_COLUMN_ROW);
       }),
       "normalization.custom.order"},
      {"offset_negative", Normalization, custom([](auto* c) { c->set_offset(-1e-9); }), "normalization.custom.offset"},
      {"offset_nan", Normalization, custom([](auto* c) { c->set_offset(kNan); }), "normalization.custom.offset"},
      {"guard_value_infinite", Normalization, custom([](auto* c) {
         c->set_guard(v1::NORMALIZATION_GUARD_ADD);
         c->set_guard_value(kInf);
       }),
       "normalization.custom.guard_value"},
      {"guard_value_without_guard", Normalization, custom([](auto* c) { c->set_guard_value(1e-6); }),
       "normalization.custom.guard_value"},
      {"logit_floor_nan", Normalization, custom([](auto* c) { c->set_logit_floor(kNan); }),
       "normalization.custom.logit_floor"},
      {"row_marginals_shape", Normalization, in([](N* n) { *n->mutable_row_marginals() = Filled({3}, 1); }),
       "normalization.row_marginals.shape"},
      {"row_marginals_zero", Normalization, in([](N* n) {
         *n->mutable_row_marginals() = Float32Tensor({2}, {1, 0});
       }),
       "normalization.row_marginals.data"},
      {"column_marginals_shape", Normalization, in([](N* n) { *n->mutable_column_marginals() = Filled({2}, 1); }),
       "normalization.column_marginals.shape"},
      {"column_marginals_negative", Normalization, in([](N* n) {
         *n->mutable_column_marginals() = Float32Tensor({3}, {1, 1, -1});
       }),
       "normalization.column_marginals.data"},
      {"exact_totals", Normalization, in([](N* n) {
         n->set_recipe(v1::NORMALIZATION_RECIPE_EXACT);
         *n->mutable_column_marginals() = Filled({3}, 1);  // 3 against the rows' 2.
       }),
       "normalization.column_marginals.data"},
      {"exact_totals_of_one_member", Normalization, in([](N* n) {
         n->set_recipe(v1::NORMALIZATION_RECIPE_EXACT);
         *n->mutable_row_marginals() = Float32Tensor({2, 2}, {1, 2, 1, 2.001f});
         *n->mutable_column_marginals() = Filled({3}, 1);
       }),
       "normalization.column_marginals.data"},
      {"dustbin_shape", Normalization, in([](N* n) {
         *n->mutable_logits() = Filled({4, 2, 3}, 0);
         *n->mutable_dustbin_score() = Filled({5}, 0);
       }),
       "normalization.dustbin_score.shape"},
      {"dustbin_nan", Normalization, in([](N* n) { *n->mutable_dustbin_score() = Filled({}, kNan); }),
       "normalization.dustbin_score.data"},
      {"cotangent_shape", Normalization, in([](N* n) {
         *n->mutable_cotangent() = Filled({3, 3}, 1);
       }),
       "normalization.cotangent.shape"},
      {"cotangent_shape_with_dustbin", Normalization, in([](N* n) {
         *n->mutable_dustbin_score() = Filled({}, 0);
         *n->mutable_cotangent() = Filled({2, 3}, 1);
       }),
       "normalization.cotangent.shape"},
      {"backward_without_cotangent", Normalization, in([](N* n) { n->set_backward_mode(v1::BACKWARD_MODE_IMPLICIT); }),
       "normalization.backward_mode"},
      {"backward_unknown", Normalization, in([](N* n) {
         *n->mutable_cotangent() = Filled({2, 3}, 1);
         n->set_backward_mode(static_cast<v1::BackwardMode>(50));
       }),
       "normalization.backward_mode"},
      {"unrolled_exact", Normalization, in([](N* n) {
         n->set_recipe(v1::NORMALIZATION_RECIPE_EXACT);
         *n->mutable_cotangent() = Filled({2, 3}, 1);
         n->set_backward_mode(v1::BACKWARD_MODE_UNROLLED);
       }),
       "normalization.backward_mode"},
      {"plan_and_logits", Normalization, in([](N* n) {
         *n->mutable_plan() = Filled({2, 3}, 1);
       }),
       "normalization.plan"},
      {"plan_without_cotangent", Normalization, plan([](N* n) { n->clear_cotangent(); }), "normalization.cotangent"},
      {"plan_negative", Normalization, plan([](N* n) {
         *n->mutable_plan() = Float32Tensor({2, 2}, {1, 1, -1, 1});
       }),
       "normalization.plan.data"},
      {"plan_dustbin", Normalization, plan([](N* n) { *n->mutable_dustbin_score() = Filled({}, 0); }),
       "normalization.dustbin_score"},
      {"plan_recipe", Normalization, plan([](N* n) { n->set_recipe(v1::NORMALIZATION_RECIPE_DEEPSEEK); }),
       "normalization.recipe"},
      {"plan_custom", Normalization, plan([](N* n) { n->mutable_custom(); }), "normalization.custom"},
      {"plan_unrolled", Normalization, plan([](N* n) { n->set_backward_mode(v1::BACKWARD_MODE_UNROLLED); }),
       "normalization.backward_mode"},
      {"apply_v", Normalization,
       [](R* r) {
         *r->mutable_apply_v() = Filled({3, 1}, 1);
       },
       "apply_v"},
      {"apply_u", Normalization,
       [](R* r) {
         *r->mutable_apply_u() = Filled({2, 1}, 1);
       },
       "apply_u"},
      {"epsilon", Normalization, [](R* r) { r->mutable_solver()->set_epsilon(1); }, "solver.epsilon"},
      {"blur", Normalization, [](R* r) { r->mutable_solver()->set_blur(1); }, "solver.blur"},
      {"scaling", Normalization, [](R* r) { r->mutable_solver()->set_scaling(.5); }, "solver.scaling"},
      {"epsilon_start", Normalization, [](R* r) { r->mutable_solver()->set_epsilon_start(1); }, "solver.epsilon_start"},
      {"update_rule", Normalization, [](R* r) { r->mutable_solver()->set_update_rule(v1::UPDATE_RULE_SYMMETRIC); },
       "solver.update_rule"},
      {"over_relaxation", Normalization,
       [](R* r) { r->mutable_solver()->set_over_relaxation(v1::OVER_RELAXATION_OFF); }, "solver.over_relaxation"},
      {"reach_a", Normalization, [](R* r) { r->mutable_solver()->set_reach_a(1); }, "solver.reach_a"},
      {"reach_b", Normalization, [](R* r) { r->mutable_solver()->set_reach_b(1); }, "solver.reach_b"},
      {"debias", Normalization, [](R* r) { r->mutable_solver()->set_debias(true); }, "solver.debias"},
      {"initial_f", Normalization, [](R* r) { *r->mutable_solver()->mutable_initial_f() = Filled({2}, 0); },
       "solver.initial_f"},
      {"initial_g", Normalization, [](R* r) { *r->mutable_solver()->mutable_initial_g() = Filled({3}, 0); },
       "solver.initial_g"},
      {"plan_iterations", Normalization,
       [plan](R* r) {
         plan([](N*) {})(r);
         r->mutable_solver()->set_max_iterations(5);
       },
       "solver.max_iterations"},
      {"plan_tolerance", Normalization,
       [plan](R* r) {
         plan([](N*) {})(r);
         r->mutable_solver()->set_tolerance(0);
       },
       "solver.tolerance"},
  };
}

std::vector<Refused> TransportRules() {
  const auto dense = [](const std::function<void(v1::DenseProblem*)>& change) {
    return [change](R* r) { change(r->mutable_dense()); };
  };
  const auto cloud = [](const std::function<void(v1::PointCloudProblem*)>& change) {
    return [change](R* r) { change(r->mutable_point_cloud()); };
  };
  return {
      {"no_cost_matrix", Dense, dense([](auto* d) { d->clear_cost(); }), "dense.cost"},
      {"cost_nan", Dense, dense([](auto* d) {
         *d->mutable_cost() = Filled({2, 3}, kNan);
       }),
       "dense.cost.data"},
      {"a_shape", Dense, dense([](auto* d) { *d->mutable_a() = Filled({3}, 1 / 3.f); }), "dense.a.shape"},
      {"b_shape", Dense, dense([](auto* d) { *d->mutable_b() = Filled({2}, .5f); }), "dense.b.shape"},
      {"a_negative", Dense, dense([](auto* d) {
         *d->mutable_a() = Float32Tensor({2}, {-1, 2});
       }),
       "dense.a.data"},
      {"a_nan", Dense, dense([](auto* d) {
         *d->mutable_a() = Float32Tensor({2}, {kNan, 1});
       }),
       "dense.a.data"},
      {"a_zero_mass", Dense, dense([](auto* d) { *d->mutable_a() = Filled({2}, 0); }), "dense.a.data"},
      {"b_zero_mass_of_one_member", Dense, dense([](auto* d) {
         *d->mutable_b() = Float32Tensor({2, 3}, {1, 0, 0, 0, 0, 0});
       }),
       "dense.b.data"},
      {"totals_differ", Dense, dense([](auto* d) { *d->mutable_a() = Filled({2}, .6f); }), "dense.a.data"},
      {"totals_differ_in_b", Dense, dense([](auto* d) {
         *d->mutable_a() = Filled({2}, .5f);
         *d->mutable_b() = Float32Tensor({3}, {.5f, .5f, 1e-4f});
       }),
       "dense.b.data"},
      {"leading_differ", Dense, dense([](auto* d) {
         *d->mutable_cost() = Filled({4, 2, 3}, 1);
         *d->mutable_a() = Filled({5, 2}, .5f);
       }),
       "dense.a.shape"},
      {"leading_rank_differs", Dense, dense([](auto* d) {
         *d->mutable_cost() = Filled({2, 2, 2, 3}, 1);
         *d->mutable_a() = Filled({4, 2}, .5f);
       }),
       "dense.a.shape"},
      {"debias_dense", Dense, [](R* r) { r->mutable_solver()->set_debias(true); }, "solver.debias"},
      {"no_x", PointCloud, cloud([](auto* c) { c->clear_x(); }), "point_cloud.x"},
      {"no_y", PointCloud, cloud([](auto* c) { c->clear_y(); }), "point_cloud.y"},
      {"no_cost", PointCloud, cloud([](auto* c) { c->clear_cost(); }), "point_cloud.cost"},
      {"unknown_cost", PointCloud, cloud([](auto* c) { c->set_cost(static_cast<v1::CostFunction>(6)); }),
       "point_cloud.cost"},
      {"zero_vector_x", PointCloud, cloud([](auto* c) { c->set_cost(v1::COST_FUNCTION_COSINE); }),
       "point_cloud.x.data"},
      {"zero_vector_y", PointCloud, cloud([](auto* c) {
         c->set_cost(v1::COST_FUNCTION_COSINE);
         *c->mutable_x() = Filled({2, 2}, 1);
         *c->mutable_y() = Filled({4, 2}, 0);
       }),
       "point_cloud.y.data"},
      {"dimension_differs", PointCloud, cloud([](auto* c) {
         *c->mutable_y() = Filled({3, 3}, 0);
       }),
       "point_cloud.y.shape"},
      {"y_dtype", PointCloud, cloud([](auto* c) {
         *c->mutable_y() = Float64Tensor({3, 2}, std::vector<double>(6));
       }),
       "point_cloud.y.dtype"},
      {"x_infinite", PointCloud, cloud([](auto* c) {
         *c->mutable_x() = Filled({2, 2}, kInf);
       }),
       "point_cloud.x.data"},
      {"mass_overflows", PointCloud, cloud([](auto* c) {
         *c->mutable_a() = Float64Tensor({2}, {1e308, 1e308});
       }),
       "point_cloud.a.data"},
      {"initial_f_shape", PointCloud, [](R* r) { *r->mutable_solver()->mutable_initial_f() = Filled({3}, 0); },
       "solver.initial_f.shape"},
      {"initial_g_nan", PointCloud, [](R* r) { *r->mutable_solver()->mutable_initial_g() = Filled({3}, kNan); },
       "solver.initial_g.data"},
      {"apply_v_shape", PointCloud,
       [](R* r) {
         *r->mutable_apply_v() = Filled({2, 4}, 0);
       },
       "apply_v.shape"},
      {"apply_v_nan", PointCloud,
       [](R* r) {
         *r->mutable_apply_v() = Filled({3, 1}, kNan);
       },
       "apply_v.data"},
      {"apply_u_shape", PointCloud,
       [](R* r) {
         *r->mutable_apply_u() = Filled({3, 4}, 0);
       },
       "apply_u.shape"},
  };
}

}  // namespace sinkhorn
