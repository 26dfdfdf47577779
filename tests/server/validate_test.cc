// Every rule of the contract has a request that breaks it and is refused with the right field, and requests that come
// close to breaking it are accepted.
#include "server/validate.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/wire.h"
#include "tests/server/requests.h"

namespace sinkhorn {
namespace {

using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// A request on its way through decoding and validation, with all that must outlive it.
struct Validated {
  std::string bytes;
  v1::SolveRequest request;
  v1::SolveResponse response;
  Prepared prepared;
  absl::optional<Error> error;
};

std::unique_ptr<Validated> Check(const v1::SolveRequest& request, const Limits& limits = Limits()) {
  auto run = std::make_unique<Validated>();
  run->bytes = request.SerializeAsString();
  EXPECT_TRUE(DecodeWithoutTensors(run->bytes, &run->request));
  run->error = Validate(run->bytes, run->request, limits, &run->prepared, &run->response);
  return run;
}

// ---- Refused --------------------------------------------------------------------------------------------------------

struct Refused {
  const char* name;
  v1::SolveRequest (*base)();
  std::function<void(v1::SolveRequest*)> change;
  const char* field;
  const char* reason = "INVALID_FIELD";
};

std::ostream& operator<<(std::ostream& out, const Refused& refused) { return out << refused.name; }

class RefusedTest : public testing::TestWithParam<Refused> {};

TEST_P(RefusedTest, NamesTheField) {
  v1::SolveRequest request = GetParam().base();
  ASSERT_FALSE(Check(request)->error.has_value()) << "the request must be valid before the change";
  GetParam().change(&request);

  Limits limits;
  limits.max_points = 50;
  limits.max_dimension = 40;
  limits.max_matrix_elements = 1000;
  limits.max_members = 100;
  limits.max_iterations = 5000;
  limits.max_reply_bytes = 20000;
  const auto run = Check(request, limits);

  ASSERT_TRUE(run->error.has_value());
  EXPECT_EQ(run->error->field, GetParam().field) << run->error->message;
  EXPECT_STREQ(run->error->reason, GetParam().reason) << run->error->message;
  EXPECT_EQ(run->error->code, absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(run->error->message, HasSubstr(GetParam().field));
  EXPECT_THAT(run->error->message, HasSubstr("; got "));
  EXPECT_EQ(run->prepared.block, nullptr) << "memory was allocated for a refused request";
}

using R = v1::SolveRequest;
using Tensor = v1::Tensor;

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

std::vector<Refused> SolverRules() {
  const auto solver = [](const std::function<void(v1::SolverOptions*)>& change) {
    return [change](R* r) { change(r->mutable_solver()); };
  };
  return {
      {"no_solver", Dense, [](R* r) { r->clear_solver(); }, "solver.epsilon"},
      {"epsilon_zero", Dense, solver([](auto* s) { s->set_epsilon(0); }), "solver.epsilon"},
      {"epsilon_negative", Dense, solver([](auto* s) { s->set_epsilon(-1); }), "solver.epsilon"},
      {"epsilon_nan", Dense, solver([](auto* s) { s->set_epsilon(kNan); }), "solver.epsilon"},
      {"epsilon_infinite", Dense, solver([](auto* s) { s->set_epsilon(kInf); }), "solver.epsilon"},
      {"epsilon_and_blur", Dense, solver([](auto* s) { s->set_blur(1); }), "solver.blur"},
      {"blur_negative", Dense, solver([](auto* s) {
         s->clear_epsilon();
         s->set_blur(-1);
       }),
       "solver.blur"},
      {"blur_squared_underflows", PointCloud, solver([](auto* s) {
         s->clear_epsilon();
         s->set_blur(1e-200);
       }),
       "solver.blur"},
      {"scaling_one", Dense, solver([](auto* s) { s->set_scaling(1); }), "solver.scaling"},
      {"scaling_negative", Dense, solver([](auto* s) { s->set_scaling(-.5); }), "solver.scaling"},
      {"scaling_nan", Dense, solver([](auto* s) { s->set_scaling(kNan); }), "solver.scaling"},
      {"epsilon_start_small", Dense, solver([](auto* s) {
         s->set_scaling(.5);
         s->set_epsilon_start(.4);
       }),
       "solver.epsilon_start"},
      {"epsilon_start_infinite", Dense, solver([](auto* s) {
         s->set_scaling(.5);
         s->set_epsilon_start(kInf);
       }),
       "solver.epsilon_start"},
      {"epsilon_start_without_scaling", Dense, solver([](auto* s) { s->set_epsilon_start(2); }),
       "solver.epsilon_start"},
      {"unknown_update_rule", Dense, solver([](auto* s) { s->set_update_rule(static_cast<v1::UpdateRule>(7)); }),
       "solver.update_rule"},
      {"unknown_over_relaxation", Dense,
       solver([](auto* s) { s->set_over_relaxation(static_cast<v1::OverRelaxation>(7)); }), "solver.over_relaxation"},
      {"unknown_precision", Dense, solver([](auto* s) { s->set_precision(static_cast<v1::Precision>(7)); }),
       "solver.precision"},
      {"iterations_negative", Dense, solver([](auto* s) { s->set_max_iterations(-1); }), "solver.max_iterations"},
      {"iterations_over_limit", Dense, solver([](auto* s) { s->set_max_iterations(5001); }), "solver.max_iterations",
       "PROBLEM_TOO_LARGE"},
      {"tolerance_negative", Dense, solver([](auto* s) { s->set_tolerance(-1e-9); }), "solver.tolerance"},
      {"tolerance_nan", Dense, solver([](auto* s) { s->set_tolerance(kNan); }), "solver.tolerance"},
      {"reach_zero", Dense, solver([](auto* s) { s->set_reach_a(0); }), "solver.reach_a"},
      {"reach_infinite", Dense, solver([](auto* s) { s->set_reach_b(kInf); }), "solver.reach_b"},
  };
}

std::vector<Refused> OutputRules() {
  const auto output = [](int value) { return [value](R* r) { r->add_outputs(static_cast<v1::Output>(value)); }; };
  return {
      {"output_unset", Dense, output(0), "outputs[0]"},
      {"output_unknown", Dense, output(12), "outputs[0]"},
      {"output_negative", Dense, output(-1), "outputs[0]"},
      {"second_output", Dense,
       [](R* r) {
         r->add_outputs(v1::OUTPUT_VALUE);
         r->add_outputs(v1::OUTPUT_PROJECTION);
       },
       "outputs[1]"},
      {"value_of_normalization", Normalization, output(v1::OUTPUT_VALUE), "outputs[0]"},
      {"value_linear_of_normalization", Normalization, output(v1::OUTPUT_VALUE_LINEAR), "outputs[0]"},
      {"primal_bound_of_normalization", Normalization, output(v1::OUTPUT_PRIMAL_BOUND), "outputs[0]"},
      {"potentials_of_normalization", Normalization, output(v1::OUTPUT_POTENTIALS), "outputs[0]"},
      {"points_of_normalization", Normalization, output(v1::OUTPUT_GRADIENT_POINTS), "outputs[0]"},
      {"masses_of_normalization", Normalization, output(v1::OUTPUT_GRADIENT_MASSES), "outputs[0]"},
      {"cost_of_normalization", Normalization, output(v1::OUTPUT_GRADIENT_COST), "outputs[0]"},
      {"points_of_dense", Dense, output(v1::OUTPUT_GRADIENT_POINTS), "outputs[0]"},
      {"projection_of_dense", Dense, output(v1::OUTPUT_PROJECTION), "outputs[0]"},
      {"cost_of_points", PointCloud, output(v1::OUTPUT_GRADIENT_COST), "outputs[0]"},
      {"primal_bound_unbalanced", Dense,
       [](R* r) {
         r->mutable_solver()->set_reach_a(1);
         r->add_outputs(v1::OUTPUT_PRIMAL_BOUND);
       },
       "outputs[0]"},
      {"primal_bound_debiased", PointCloud,
       [](R* r) {
         r->mutable_solver()->set_debias(true);
         r->add_outputs(v1::OUTPUT_PRIMAL_BOUND);
       },
       "outputs[0]"},
      {"hessian_of_dense", Dense,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 2}, 1);
       },
       "hessian"},
      {"hessian_of_distances", PointCloud,
       [](R* r) {
         r->mutable_point_cloud()->set_cost(v1::COST_FUNCTION_EUCLIDEAN);
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 2}, 1);
       },
       "hessian"},
      {"hessian_of_nothing", PointCloud, [](R* r) { r->mutable_hessian()->set_max_iterations(5); }, "hessian.x"},
      {"hessian_shape", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 3}, 1);
       },
       "hessian.x.shape"},
      {"hessian_counts_differ", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 2}, 1);
         *r->mutable_hessian()->mutable_y() = Filled({2, 3, 2}, 1);
       },
       "hessian.y.shape"},
      {"hessian_nan", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_y() = Filled({1, 3, 2}, kNan);
       },
       "hessian.y.data"},
      {"hessian_preconditioner", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 2}, 1);
         r->mutable_hessian()->set_preconditioner(static_cast<v1::Preconditioner>(9));
       },
       "hessian.preconditioner"},
      {"hessian_terms_without_neumann", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 2}, 1);
         r->mutable_hessian()->set_neumann_terms(2);
       },
       "hessian.neumann_terms"},
      {"hessian_tolerance", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 2}, 1);
         r->mutable_hessian()->set_tolerance(kNan);
       },
       "hessian.tolerance"},
      {"hessian_negative_iterations", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 2}, 1);
         r->mutable_hessian()->set_max_iterations(-1);
       },
       "hessian.max_iterations"},
      {"sparse_plan_of_normalization", Normalization, [](R* r) { r->mutable_sparse_plan()->set_max_entries(5); },
       "sparse_plan"},
      {"sparse_plan_threshold", Dense,
       [](R* r) {
         r->mutable_sparse_plan()->set_threshold(-1);
         r->mutable_sparse_plan()->set_max_entries(5);
       },
       "sparse_plan.threshold"},
      {"sparse_plan_without_room", Dense, [](R* r) { r->mutable_sparse_plan()->set_threshold(0.5); },
       "sparse_plan.max_entries"},
      {"plan_from_plan", Normalization,
       [](R* r) {
         r->mutable_normalization()->clear_logits();
         *r->mutable_normalization()->mutable_plan() = Filled({2, 2}, 1);
         *r->mutable_normalization()->mutable_cotangent() = Filled({2, 2}, 1);
         r->add_outputs(v1::OUTPUT_PLAN);
       },
       "outputs[0]"},
  };
}

std::vector<Refused> LimitRules() {  // The limits are those of NamesTheField.
  const char* const kReason = "PROBLEM_TOO_LARGE";
  return {
      {"request_id", Dense, [](R* r) { r->set_request_id(std::string(129, 'x')); }, "request_id"},
      {"points_x", PointCloud,
       [](R* r) {
         *r->mutable_point_cloud()->mutable_x() = Filled({51, 2}, 0);
       },
       "point_cloud.x.shape", kReason},
      {"points_y", PointCloud,
       [](R* r) {
         *r->mutable_point_cloud()->mutable_y() = Filled({51, 2}, 0);
       },
       "point_cloud.y.shape", kReason},
      {"dimension", PointCloud,
       [](R* r) {
         *r->mutable_point_cloud()->mutable_x() = Filled({2, 41}, 0);
         *r->mutable_point_cloud()->mutable_y() = Filled({3, 41}, 0);
       },
       "point_cloud.x.shape", kReason},
      {"matrix_dense", Dense,
       [](R* r) {
         *r->mutable_dense()->mutable_cost() = Filled({7, 143}, 0);
       },
       "dense.cost.shape", kReason},
      {"matrix_logits", Normalization,
       [](R* r) {
         *r->mutable_normalization()->mutable_logits() = Filled({7, 143}, 0);
       },
       "normalization.logits.shape", kReason},
      {"matrix_logits_with_dustbin", Normalization,
       [](R* r) {
         *r->mutable_normalization()->mutable_logits() = Filled({31, 31}, 0);  // 961, with the dustbin 1024.
         *r->mutable_normalization()->mutable_dustbin_score() = Filled({}, 0);
       },
       "normalization.logits.shape", kReason},
      {"matrix_plan_given", Normalization,
       [](R* r) {
         r->mutable_normalization()->clear_logits();
         *r->mutable_normalization()->mutable_plan() = Filled({7, 143}, 0);
         *r->mutable_normalization()->mutable_cotangent() = Filled({7, 143}, 0);
       },
       "normalization.plan.shape", kReason},
      {"matrix_plan_of_points", PointCloud,
       [](R* r) {
         *r->mutable_point_cloud()->mutable_x() = Filled({40, 2}, 0);
         *r->mutable_point_cloud()->mutable_y() = Filled({40, 2}, 0);
         r->add_outputs(v1::OUTPUT_PLAN);
       },
       "outputs", kReason},
      {"members", Dense,
       [](R* r) {
         *r->mutable_dense()->mutable_cost() = Filled({101, 2, 3}, 0);
       },
       "problem", kReason},
      {"members_of_two_dimensions", Dense,
       [](R* r) {
         *r->mutable_dense()->mutable_a() = Filled({11, 10, 2}, .5f);
       },
       "problem", kReason},
      {"apply_columns", Dense,
       [](R* r) {
         *r->mutable_apply_v() = Filled({3, 41}, 0);
       },
       "apply_v.shape", kReason},
      {"apply_u_columns", Dense,
       [](R* r) {
         *r->mutable_apply_u() = Filled({2, 41}, 0);
       },
       "apply_u.shape", kReason},
      {"hessian_directions", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({129, 2, 2}, 1);
       },
       "hessian", kReason},
      {"hessian_iterations", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 2}, 1);
         r->mutable_hessian()->set_max_iterations(5001);
       },
       "hessian.max_iterations", kReason},
      {"sparse_plan_entries", Dense, [](R* r) { r->mutable_sparse_plan()->set_max_entries(1001); },
       "sparse_plan.max_entries", kReason},
      {"sparse_plan_bytes", Dense,
       [](R* r) {
         *r->mutable_dense()->mutable_cost() = Filled({90, 3, 10}, 0);
         r->mutable_sparse_plan()->set_max_entries(1000);
         r->add_outputs(v1::OUTPUT_VALUE);
       },
       "outputs", kReason},
      {"reply_bytes", Dense,
       [](R* r) {
         *r->mutable_dense()->mutable_a() = Filled({90, 2}, .5f);
         *r->mutable_dense()->mutable_cost() = Filled({2, 30}, 0);
         r->add_outputs(v1::OUTPUT_PLAN);
       },
       "outputs", kReason},
  };
}

std::string NameOf(const testing::TestParamInfo<Refused>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Tensor, RefusedTest, testing::ValuesIn(TensorRules()), NameOf);
INSTANTIATE_TEST_SUITE_P(Normalization, RefusedTest, testing::ValuesIn(NormalizationRules()), NameOf);
INSTANTIATE_TEST_SUITE_P(Transport, RefusedTest, testing::ValuesIn(TransportRules()), NameOf);
INSTANTIATE_TEST_SUITE_P(Solver, RefusedTest, testing::ValuesIn(SolverRules()), NameOf);
INSTANTIATE_TEST_SUITE_P(Output, RefusedTest, testing::ValuesIn(OutputRules()), NameOf);
INSTANTIATE_TEST_SUITE_P(Limit, RefusedTest, testing::ValuesIn(LimitRules()), NameOf);

// ---- Accepted -------------------------------------------------------------------------------------------------------

TEST(ValidateTest, NormalizationDefaults) {
  const auto run = Check(Normalization());
  ASSERT_FALSE(run->error.has_value());
  const Problem& problem = run->prepared.problem;
  EXPECT_EQ(problem.kind, ProblemKind::kNormalization);
  EXPECT_EQ(problem.count, 1);
  EXPECT_EQ(problem.n, 2);
  EXPECT_EQ(problem.m, 3);
  EXPECT_EQ(problem.solver.max_iterations, 20);
  EXPECT_EQ(problem.solver.tolerance, 0);
  EXPECT_EQ(problem.normalization.recipe.logit_floor, -1e5);
  EXPECT_TRUE(problem.outputs.plan);
  EXPECT_FALSE(problem.outputs.gradient_logits);
  EXPECT_EQ(problem.outputs.value, nullptr);
  ASSERT_EQ(run->prepared.tensors.size(), 1u);
  EXPECT_EQ(run->prepared.tensors[0].shape, (std::vector<int64_t>{2, 3}));
  // The view is of the request's own bytes: nothing was copied.
  const char* data = static_cast<const char*>(problem.normalization.logits.data);
  EXPECT_GE(data, run->bytes.data());
  EXPECT_LT(data, run->bytes.data() + run->bytes.size());
  float last;
  std::memcpy(&last, data + 5 * sizeof(float), sizeof(last));
  EXPECT_EQ(last, 5.0f);
}

TEST(ValidateTest, TransportDefaults) {
  const auto run = Check(PointCloud());
  ASSERT_FALSE(run->error.has_value());
  const Problem& problem = run->prepared.problem;
  EXPECT_EQ(problem.kind, ProblemKind::kPointCloud);
  EXPECT_EQ(problem.dim, 2);
  EXPECT_EQ(problem.transport.kappa, 1);
  EXPECT_EQ(problem.solver.max_iterations, 1000);
  EXPECT_EQ(problem.solver.tolerance, 1e-5);
  EXPECT_TRUE(problem.solver.over_relaxation);
  EXPECT_EQ(problem.solver.epsilon_decay, 0);
  EXPECT_TRUE(std::isinf(problem.solver.rho_a));
  EXPECT_NE(problem.outputs.value, nullptr);
  EXPECT_NE(problem.outputs.dual_bound, nullptr);
  EXPECT_EQ(problem.outputs.primal_bound, nullptr);
  EXPECT_TRUE(problem.outputs.f);
  EXPECT_TRUE(problem.outputs.g);
  EXPECT_FALSE(problem.outputs.f_aa);
  EXPECT_FALSE(problem.outputs.plan);
}

// Squared distances have degree 2, the other costs of points 1.
TEST(ValidateTest, CostsOfPoints) {
  const struct {
    v1::CostFunction function;
    PointCost cost;
    double kappa, epsilon;
  } rows[] = {{v1::COST_FUNCTION_SQUARED_EUCLIDEAN, PointCost::kSquaredEuclidean, 1, 0.25},
              {v1::COST_FUNCTION_HALF_SQUARED_EUCLIDEAN, PointCost::kSquaredEuclidean, 0.5, 0.25},
              {v1::COST_FUNCTION_EUCLIDEAN, PointCost::kEuclidean, 1, 0.5},
              {v1::COST_FUNCTION_COSINE, PointCost::kCosine, 1, 0.5},
              {v1::COST_FUNCTION_NEGATIVE_DOT, PointCost::kNegativeDot, 1, 0.5}};
  for (const auto& row : rows) {
    v1::SolveRequest request = PointCloud();
    *request.mutable_point_cloud()->mutable_x() = Filled({3, 2}, 1);
    *request.mutable_point_cloud()->mutable_y() = Filled({4, 2}, 1);
    request.mutable_point_cloud()->set_cost(row.function);
    request.mutable_solver()->clear_epsilon();
    request.mutable_solver()->set_blur(0.5);
    const auto run = Check(request);
    ASSERT_FALSE(run->error.has_value()) << run->error->message;
    EXPECT_EQ(run->prepared.problem.transport.point_cost, row.cost);
    EXPECT_EQ(run->prepared.problem.transport.kappa, row.kappa);
    EXPECT_EQ(run->prepared.problem.solver.epsilon, row.epsilon);
  }
}

TEST(ValidateTest, ZeroVectorsAreNamed) {
  v1::SolveRequest request = PointCloud();
  request.mutable_point_cloud()->set_cost(v1::COST_FUNCTION_COSINE);
  *request.mutable_point_cloud()->mutable_y() = Filled({4, 2}, 1);
  v1::Tensor x = Filled({2, 3, 2}, 1);
  const float tiny[2] = {0, 1e-40f};  // Subnormal: arithmetic may take it for zero.
  std::memcpy(&(*x.mutable_data())[5 * sizeof(tiny)], tiny, sizeof(tiny));
  *request.mutable_point_cloud()->mutable_x() = x;
  const auto run = Check(request);
  ASSERT_TRUE(run->error.has_value());
  EXPECT_EQ(run->error->field, "point_cloud.x.data");
  EXPECT_NE(run->error->message.find("row 2 of member 1"), std::string::npos) << run->error->message;
  request.mutable_point_cloud()->set_cost(v1::COST_FUNCTION_EUCLIDEAN);
  EXPECT_FALSE(Check(request)->error.has_value());
}

TEST(ValidateTest, LengthsBecomeEnergies) {
  v1::SolveRequest request = PointCloud();
  request.mutable_solver()->clear_epsilon();
  request.mutable_solver()->set_blur(0.5);
  request.mutable_solver()->set_scaling(0.8);
  request.mutable_solver()->set_reach_a(3);
  const auto cloud = Check(request);
  ASSERT_FALSE(cloud->error.has_value());
  EXPECT_DOUBLE_EQ(cloud->prepared.problem.solver.epsilon, 0.25);
  EXPECT_DOUBLE_EQ(cloud->prepared.problem.solver.epsilon_decay, 0.64);
  EXPECT_DOUBLE_EQ(cloud->prepared.problem.solver.rho_a, 9);
  EXPECT_TRUE(std::isinf(cloud->prepared.problem.solver.rho_b));

  request = Dense();
  request.mutable_solver()->clear_epsilon();
  request.mutable_solver()->set_blur(0.5);
  const auto dense = Check(request);
  ASSERT_FALSE(dense->error.has_value());
  EXPECT_DOUBLE_EQ(dense->prepared.problem.solver.epsilon, 0.5);
}

TEST(ValidateTest, SharedAndBatchedTensors) {
  v1::SolveRequest request = Dense();  // The cost is shared by the 2 x 4 members that a brings.
  *request.mutable_dense()->mutable_a() = Filled({2, 4, 2}, 0.5f);
  request.add_outputs(v1::OUTPUT_PLAN);
  request.add_outputs(v1::OUTPUT_VALUE);
  request.add_outputs(v1::OUTPUT_MEMBERS);
  const auto run = Check(request);
  ASSERT_FALSE(run->error.has_value()) << run->error->message;
  EXPECT_EQ(run->prepared.problem.count, 8);
  EXPECT_TRUE(run->prepared.problem.transport.cost.shared);
  EXPECT_FALSE(run->prepared.problem.transport.a.shared);
  EXPECT_EQ(run->prepared.tensors[0].shape, (std::vector<int64_t>{2, 4, 2, 3}));
  EXPECT_EQ(run->prepared.tensors[0].bytes, 2u * 4 * 2 * 3 * 4);
  EXPECT_EQ(run->response.value_size(), 8);
  EXPECT_EQ(run->prepared.members.size(), 8u);
}

TEST(ValidateTest, DustbinAddsARowAndAColumn) {
  v1::SolveRequest request = Normalization();
  auto* problem = request.mutable_normalization();
  *problem->mutable_logits() = Filled({4, 2, 3}, 0);
  *problem->mutable_dustbin_score() = Filled({4}, 1);
  *problem->mutable_cotangent() = Filled({3, 4}, 1);  // Shared.
  const auto run = Check(request);
  ASSERT_FALSE(run->error.has_value()) << run->error->message;
  ASSERT_EQ(run->prepared.tensors.size(), 3u);
  EXPECT_EQ(run->prepared.tensors[0].shape, (std::vector<int64_t>{4, 3, 4}));
  EXPECT_EQ(run->prepared.tensors[1].shape, (std::vector<int64_t>{4, 2, 3}));
  EXPECT_EQ(run->prepared.tensors[2].shape, (std::vector<int64_t>{4}));
  EXPECT_EQ(run->prepared.problem.normalization.backward, BackwardMode::kUnrolled);
}

TEST(ValidateTest, BackwardFromPlanAlone) {
  v1::SolveRequest request;
  *request.mutable_normalization()->mutable_plan() = Float32Tensor({2, 2}, {-0.0f, 1, 1, 0});
  *request.mutable_normalization()->mutable_cotangent() = Filled({2, 2}, -1);
  const auto run = Check(request);
  ASSERT_FALSE(run->error.has_value()) << run->error->message;
  EXPECT_EQ(run->prepared.problem.normalization.backward, BackwardMode::kImplicit);
  ASSERT_EQ(run->prepared.tensors.size(), 1u);
  EXPECT_EQ(run->prepared.tensors[0].field, v1::SolveResponse::kGradientLogitsFieldNumber);
}

TEST(ValidateTest, EveryOutputOfADebiasedCloudHasItsOwnMemory) {
  v1::SolveRequest request = PointCloud();
  request.mutable_solver()->set_debias(true);
  for (int output : {1, 2, 4, 5, 6, 7, 8, 10, 11}) request.add_outputs(static_cast<v1::Output>(output));
  *request.mutable_apply_v() = Filled({3, 5}, 1);
  *request.mutable_apply_u() = Filled({2, 7}, 1);
  const auto run = Check(request);
  ASSERT_FALSE(run->error.has_value()) << run->error->message;
  EXPECT_EQ(run->prepared.tensors.size(), 15u);
  size_t end = 0;
  for (const ReplyTensor& tensor : run->prepared.tensors) {
    EXPECT_GE(tensor.offset, end);
    EXPECT_EQ(tensor.offset % 64, 0u);
    end = tensor.offset + tensor.bytes;
  }
  EXPECT_LE(end, run->prepared.block_bytes);
  EXPECT_TRUE(run->prepared.problem.outputs.g_bb);
  EXPECT_EQ(run->prepared.problem.transport.v_columns, 5);
  EXPECT_EQ(run->prepared.problem.transport.u_columns, 7);
}

TEST(ValidateTest, TotalsMayDifferWithinRoundingOrWhenRelaxed) {
  v1::SolveRequest request = Dense();
  *request.mutable_dense()->mutable_a() = Float32Tensor({2}, {0.5f, 0.500004f});
  EXPECT_FALSE(Check(request)->error.has_value());
  *request.mutable_dense()->mutable_a() = Float32Tensor({2}, {0.5f, 0.7f});
  EXPECT_TRUE(Check(request)->error.has_value());
  request.mutable_solver()->set_reach_b(1);
  EXPECT_FALSE(Check(request)->error.has_value());
}

TEST(ValidateTest, ExactChoosesColumnTotalsAndChecksGivenOnes) {
  v1::SolveRequest request = Normalization();
  request.mutable_normalization()->set_recipe(v1::NORMALIZATION_RECIPE_EXACT);
  EXPECT_FALSE(Check(request)->error.has_value());
  EXPECT_EQ(Check(request)->prepared.problem.solver.max_iterations, 200);
  *request.mutable_normalization()->mutable_row_marginals() = Filled({2}, 3);
  EXPECT_FALSE(Check(request)->error.has_value());
  *request.mutable_normalization()->mutable_column_marginals() = Filled({3}, 2);
  EXPECT_FALSE(Check(request)->error.has_value());
}

TEST(ValidateTest, LimitsThemselvesAreAccepted) {
  Limits limits;
  limits.max_points = 3;
  limits.max_dimension = 2;
  limits.max_members = 1;
  limits.max_iterations = 7;
  v1::SolveRequest request = PointCloud();
  request.mutable_solver()->set_max_iterations(7);
  request.set_request_id(std::string(128, 'x'));
  EXPECT_FALSE(Check(request, limits)->error.has_value());
}

TEST(ValidateTest, TheMessageTellsFieldRuleAndValue) {
  v1::SolveRequest request = PointCloud();
  *request.mutable_point_cloud()->mutable_x() = Float32Tensor({2, 2}, {0, 1, kNan, 3});
  EXPECT_EQ(Check(request)->error->message, "point_cloud.x.data must be finite; got nan at element 2");
  *request.mutable_point_cloud()->mutable_x() = Filled({2, 3}, 0);
  EXPECT_EQ(Check(request)->error->message, "point_cloud.y.shape must be [..., m, d = 3]; got [3, 2]");
}

// Data is scanned in blocks: the first offender is found wherever it stands.
TEST(ValidateTest, FindsTheOffenderAtAnyPosition) {
  for (int64_t position : {0, 1, 4095, 4096, 8191, 9999}) {
    std::vector<float> values(10000, 1);
    values[position] = kNan;
    values[9999] = kNan;
    v1::SolveRequest request;
    *request.mutable_normalization()->mutable_logits() = Float32Tensor({100, 100}, values);
    const auto run = Check(request);
    ASSERT_TRUE(run->error.has_value());
    EXPECT_THAT(run->error->message, testing::EndsWith(absl::StrCat("at element ", position)));
  }
}

// Denormals, minus zero and the largest finite numbers are finite, in every dtype and at any alignment.
TEST(ValidateTest, EdgesOfTheFormats) {
  v1::SolveRequest request = Normalization();
  auto* logits = request.mutable_normalization()->mutable_logits();
  for (const char* id : {"", "x", "xx", "xxx"}) {  // Moves the data by a byte.
    request.set_request_id(id);
    *logits = Float32Tensor({1, 4}, {-0.0f, 1e-45f, 3.4028235e38f, -3.4028235e38f});
    EXPECT_FALSE(Check(request)->error.has_value());
    *logits = Float64Tensor({1, 3}, {5e-324, 1.7976931348623157e308, -1.7976931348623157e308});
    EXPECT_FALSE(Check(request)->error.has_value());
    *logits = Float32Tensor({1, 4}, {});
    logits->set_dtype(v1::DATA_TYPE_FLOAT16);
    logits->set_data(std::string("\x01\x00\xff\x7b\xff\xfb\x00\x80", 8));  // Denormal, +-65504, -0.
    EXPECT_FALSE(Check(request)->error.has_value());
    logits->set_dtype(v1::DATA_TYPE_BFLOAT16);
    logits->set_data(std::string("\x01\x00\x7f\x7f\x7f\xff\x00\x80", 8));
    EXPECT_FALSE(Check(request)->error.has_value());
  }
}

}  // namespace
}  // namespace sinkhorn
