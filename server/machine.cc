// Version 2 of control groups has one tree, version 1 one for each kind of resource. A limit of any ancestor counts; a
// container often sees its own group as the root.
#include "server/machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <sstream>

namespace sinkhorn {
namespace {

constexpr char kMount[] = "/sys/fs/cgroup";

// The first line; empty if there is none.
std::string FirstLine(const std::string& path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

// Calls `visit` with each folder of the process's group of `controller` and of its ancestors, for both versions.
void VisitGroups(const std::string& root, const std::string& controller,
                 const std::function<void(const std::string&)>& visit) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // HIERARCHY:CONTROLLERS:PATH
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool unified = controllers == ",,";
    if (!unified && controllers.find("," + controller + ",") == std::string::npos) continue;
    const std::string top = root + kMount + (unified ? "" : "/" + controller);
    std::string path = line.substr(second + 1);
    for (;;) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      visit(top + path);
      if (path.empty()) break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
}

// Cores' worth of CPU time that a group may take; infinite: no limit.
double Quota(const std::string& group) {
  double quota = -1, period = 0;
  std::istringstream(FirstLine(group + "/cpu.max")) >> quota >> period;  // "max 100000" leaves both as they are.
  if (period <= 0) {
    std::istringstream(FirstLine(group + "/cpu.cfs_quota_us")) >> quota;  // -1: none.
    std::istringstream(FirstLine(group + "/cpu.cfs_period_us")) >> period;
  }
  return quota > 0 && period > 0 ? quota / period : std::numeric_limits<double>::infinity();
}

}  // namespace

int AvailableCores(const std::string& root) {
  cpu_set_t set;
  double cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  VisitGroups(root, "cpu", [&](const std::string& group) { cores = std::min(cores, std::ceil(Quota(group))); });
  return std::max(1, static_cast<int>(cores));
}

int64_t MemoryLimitBytes(const std::string& root) {
  int64_t least = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  VisitGroups(root, "memory", [&](const std::string& group) {
    for (const char* name : {"/memory.max", "/memory.limit_in_bytes"}) {
      int64_t limit = 0;
      if (std::istringstream(FirstLine(group + name)) >> limit && limit > 0) least = std::min(least, limit);
    }
  });
  return least;
}

}  // namespace sinkhorn
