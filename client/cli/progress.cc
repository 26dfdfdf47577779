#include "client/cli/progress.h"

#include <unistd.h>

#include <cstdio>

#include "absl/time/clock.h"

namespace sinkhorn::client {

void WaitWithProgress(const std::string& label, absl::Duration timeout, const absl::Notification& done) {
  const absl::Time start = absl::Now();
  if (isatty(STDERR_FILENO) == 0) {
    done.WaitForNotification();
    return;
  }
  if (done.WaitForNotificationWithTimeout(absl::Milliseconds(500))) return;
  do {
    const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
    if (timeout == absl::InfiniteDuration()) {
      std::fprintf(stderr, "\r\x1b[K%s: %.1f s", label.c_str(), seconds);
    } else {
      std::fprintf(stderr, "\r\x1b[K%s: %.1f s of %g s", label.c_str(), seconds, absl::ToDoubleSeconds(timeout));
    }
  } while (!done.WaitForNotificationWithTimeout(absl::Milliseconds(100)));
  std::fprintf(stderr, "\r\x1b[K");
}

}  // namespace sinkhorn::client
