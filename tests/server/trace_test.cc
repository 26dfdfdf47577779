// W3C trace context: the examples of its section 3.2 and what it says of malformed values.
#include "server/trace.h"

#include "gtest/gtest.h"

namespace sinkhorn {
namespace {

constexpr char kId[] = "4bf92f3577b34da6a3ce929d0e0e4736";

TEST(TraceTest, TheIdOfTheCaller) {
  EXPECT_EQ(TraceIdOf("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"), kId);
  EXPECT_EQ(TraceIdOf("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"), kId);
  EXPECT_EQ(TraceIdOf("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"), kId);
  EXPECT_EQ(TraceIdOf("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-what-the-future-holds"), kId);
}

TEST(TraceTest, NoneIfMalformed) {
  for (const char* value : {
           "",
           "00",
           "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0",     // Too short.
           "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x",  // Version 0 ends there.
           "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01.x",  // Not a field of its own.
           "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",    // Not a version.
           "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",    // Capitals.
           "00-00000000000000000000000000000000-00f067aa0ba902b7-01",    // No trace.
           "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",    // No parent.
           "00-4bf92f3577b34da6a3ce929d0e0e473g-00f067aa0ba902b7-01",    // Not a digit.
           "00_4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
       }) {
    EXPECT_EQ(TraceIdOf(value), "") << value;
  }
}

}  // namespace
}  // namespace sinkhorn
