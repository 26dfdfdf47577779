// The status table, the log line, and the wire format where no RPC is needed.
#include "server/status.h"

#include <string>

#include "google/rpc/error_details.pb.h"
#include "gtest/gtest.h"
#include "server/log.h"
#include "server/wire.h"
#include "tests/server/requests.h"

namespace sinkhorn {
namespace {

TEST(StatusTest, Table) {
  const struct {
    Error error;
    absl::StatusCode code;
    const char* reason;
    const char* pushback;  // nullptr: none.
  } rows[] = {
      {InvalidField("x", "must be > 0", "-1"), absl::StatusCode::kInvalidArgument, "INVALID_FIELD", nullptr},
      {TooLarge("x", "points", 5, 6), absl::StatusCode::kInvalidArgument, "PROBLEM_TOO_LARGE", nullptr},
      {QueueFull(absl::Microseconds(1500), "full"), absl::StatusCode::kResourceExhausted, "QUEUE_FULL", "2"},
      {InfeasibleDeadline(absl::Seconds(1), absl::Seconds(2)), absl::StatusCode::kDeadlineExceeded,
       "INFEASIBLE_DEADLINE", "-1"},
      {Unsupported("solver.time_budget", "is not supported"), absl::StatusCode::kUnimplemented, "UNSUPPORTED", nullptr},
      {Expired("queue"), absl::StatusCode::kDeadlineExceeded, "EXPIRED", nullptr},
      {Cancelled("queue"), absl::StatusCode::kCancelled, "CANCELLED", nullptr},
      {Unauthenticated(), absl::StatusCode::kUnauthenticated, "UNAUTHENTICATED", nullptr},
      {Warming(), absl::StatusCode::kUnavailable, "WARMING", nullptr},
      {Draining(), absl::StatusCode::kUnavailable, "DRAINING", nullptr},
      {DeviceLost("why"), absl::StatusCode::kUnavailable, "DEVICE_LOST", nullptr},
      {DeviceMemory("why"), absl::StatusCode::kResourceExhausted, "DEVICE_MEMORY", nullptr},
      {Diverged("why"), absl::StatusCode::kFailedPrecondition, "DIVERGED", nullptr},
      {Internal("id"), absl::StatusCode::kInternal, "INTERNAL", nullptr},
  };
  for (const auto& row : rows) {
    const google::rpc::Status status = ToRpcStatus(row.error);
    EXPECT_EQ(status.code(), static_cast<int>(row.code)) << row.reason;
    EXPECT_FALSE(status.message().empty());
    google::rpc::ErrorInfo info;
    ASSERT_GE(status.details_size(), 1);
    ASSERT_TRUE(status.details(0).UnpackTo(&info));
    EXPECT_EQ(info.reason(), row.reason);
    EXPECT_EQ(info.domain(), "sinkhorn");
    const auto pushback = RetryPushback(row.error);
    ASSERT_EQ(pushback.has_value(), row.pushback != nullptr) << row.reason;
    if (pushback.has_value()) {
      EXPECT_EQ(*pushback, row.pushback);
    }
  }
}

TEST(LogTest, LinesAreJson) {
  EXPECT_EQ(LogLine("now", Severity::kWarning, "event", {{"a", "plain"}, {"b", "\"\\\n\x01\xc3\xa9"}}),
            "{\"time\":\"now\",\"severity\":\"WARNING\",\"event\":\"event\",\"a\":\"plain\","
            "\"b\":\"\\\"\\\\\\u000a\\u0001\xc3\xa9\"}");
}

// ---- Wire -----------------------------------------------------------------------------------------------------------

TEST(WireTest, TensorsAreViewsOfTheMessage) {
  v1::SolveStreamRequest request;
  *request.mutable_solve() = PointCloud();
  *request.mutable_solve()->mutable_apply_v() = Filled({3, 1}, 9);
  *request.mutable_solve()->mutable_solver()->mutable_initial_f() = Filled({2}, 4);
  const std::string bytes = request.SerializeAsString();
  v1::SolveStreamRequest decoded;
  ASSERT_TRUE(DecodeWithoutTensors(bytes, &decoded));
  const auto same = [&](const v1::Tensor& actual, const v1::Tensor& expected) {
    const absl::string_view data = TensorData(bytes, actual);
    EXPECT_EQ(data, expected.data());
    EXPECT_GE(data.data(), bytes.data());
    EXPECT_LE(data.data() + data.size(), bytes.data() + bytes.size());
  };
  same(decoded.solve().point_cloud().x(), request.solve().point_cloud().x());
  same(decoded.solve().point_cloud().y(), request.solve().point_cloud().y());
  same(decoded.solve().apply_v(), request.solve().apply_v());
  same(decoded.solve().solver().initial_f(), request.solve().solver().initial_f());
  EXPECT_TRUE(TensorData(bytes, decoded.solve().point_cloud().a()).empty());
  // All else is as it was.
  EXPECT_EQ(decoded.solve().solver().epsilon(), request.solve().solver().epsilon());
  EXPECT_EQ(decoded.solve().point_cloud().x().shape(1), 2);
}

// Protobuf's rules for repeated singular fields hold: messages merge, the last scalar wins, and so does the last data.
TEST(WireTest, RepeatedFieldsMerge) {
  v1::SolveRequest first = Dense(), second;
  second.mutable_dense()->mutable_cost()->set_data("other");
  second.set_request_id("second");
  const std::string bytes = first.SerializeAsString() + second.SerializeAsString();
  v1::SolveRequest decoded;
  ASSERT_TRUE(DecodeWithoutTensors(bytes, &decoded));
  EXPECT_EQ(TensorData(bytes, decoded.dense().cost()), "other");
  EXPECT_EQ(decoded.dense().cost().shape_size(), 2);
  EXPECT_EQ(decoded.request_id(), "second");
}

TEST(WireTest, UnknownFieldsAreSkipped) {
  v1::SolveRequest request = Dense();
  // Field 1000: a varint, a fixed64, bytes, a fixed32.
  const std::string bytes = request.SerializeAsString() + "\xc0\x3e\x05" + std::string("\xc1\x3e\1\2\3\4\5\6\7\x08") +
                            std::string("\xc2\x3e\x02\x0a\xff") + std::string("\xc5\x3e\1\2\3\4");
  v1::SolveRequest decoded;
  ASSERT_TRUE(DecodeWithoutTensors(bytes, &decoded));
  EXPECT_EQ(TensorData(bytes, decoded.dense().cost()), request.dense().cost().data());
}

TEST(WireTest, EveryTruncationIsRefusedOrParsesAsProtobufDoes) {
  v1::SolveRequest request = PointCloud();
  request.set_request_id("id");
  const std::string bytes = request.SerializeAsString();
  for (size_t size = 0; size < bytes.size(); ++size) {
    const std::string part = bytes.substr(0, size);
    v1::SolveRequest decoded, reference;
    EXPECT_EQ(DecodeWithoutTensors(part, &decoded), reference.ParseFromString(part)) << size;
  }
}

TEST(WireTest, EveryFlippedByteParsesAsProtobufDoes) {
  const std::string bytes = PointCloud().SerializeAsString();
  for (size_t position = 0; position < bytes.size(); ++position) {
    for (int mask : {0x01, 0x07, 0x40, 0x80, 0xff}) {
      std::string changed = bytes;
      changed[position] = static_cast<char>(changed[position] ^ mask);
      v1::SolveRequest decoded, reference;
      const bool parsed = DecodeWithoutTensors(changed, &decoded);
      if (!parsed) continue;  // May refuse what protobuf tolerates (groups), never the reverse.
      ASSERT_TRUE(reference.ParseFromString(changed)) << position;
      EXPECT_EQ(TensorData(changed, decoded.point_cloud().x()), reference.point_cloud().x().data());
      EXPECT_EQ(TensorData(changed, decoded.point_cloud().y()), reference.point_cloud().y().data());
    }
  }
}

TEST(WireTest, RepliesParse) {
  v1::SolveResponse response;
  response.set_request_id("id");
  response.add_value(1.5);
  response.mutable_convergence()->set_iterations(3);
  const std::string block = "0123456789abcdef";
  ReplyTensor f, scalar;
  f.field = v1::SolveResponse::kFFieldNumber;
  f.dtype = v1::DATA_TYPE_FLOAT32;
  f.shape = {300, 1};
  f.bytes = 12;
  scalar.field = v1::SolveResponse::kGradientDustbinScoreFieldNumber;
  scalar.dtype = v1::DATA_TYPE_FLOAT16;
  scalar.offset = 12;
  scalar.bytes = 2;
  const ReplyTensor tensors[] = {f, scalar};
  const auto flatten = [&](const std::vector<WirePiece>& pieces) {
    std::string bytes;
    for (const WirePiece& piece : pieces) {
      bytes += piece.head;
      if (piece.tensor != nullptr) bytes += block.substr(piece.tensor->offset, piece.tensor->bytes);
      EXPECT_LE(piece.head.size(), static_cast<size_t>(kTensorHeaderBytesMax));
    }
    return bytes;
  };

  v1::SolveResponse parsed;
  ASSERT_TRUE(parsed.ParseFromString(flatten(EncodeResponse(response, tensors, absl::nullopt))));
  EXPECT_EQ(parsed.request_id(), "id");
  EXPECT_EQ(parsed.value(0), 1.5);
  EXPECT_EQ(parsed.f().data(), "0123456789ab");
  EXPECT_EQ(parsed.f().shape(0), 300);
  EXPECT_EQ(parsed.f().dtype(), v1::DATA_TYPE_FLOAT32);
  EXPECT_EQ(parsed.gradient_dustbin_score().data(), "cd");
  EXPECT_EQ(parsed.gradient_dustbin_score().shape_size(), 0);
  EXPECT_FALSE(parsed.has_g());

  v1::SolveStreamResponse in_stream;
  ASSERT_TRUE(in_stream.ParseFromString(flatten(EncodeResponse(response, tensors, "stream id"))));
  EXPECT_EQ(in_stream.request_id(), "stream id");
  EXPECT_EQ(in_stream.solve().SerializeAsString(), parsed.SerializeAsString());
}

}  // namespace
}  // namespace sinkhorn
