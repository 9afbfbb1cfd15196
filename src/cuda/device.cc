#include "cuda/device.h"

#include <array>
#include <charconv>
#include <cstring>
#include <mutex>

#include "core/error.h"
#include "cuda/cuda.h"
#include "cuda/loaded.h"

namespace tessera::cuda {
namespace {

core::Device ask(const Driver& driver, Ordinal ordinal) {
  core::Device d = {};
  d.size = sizeof d;
  d.kind = TESSERA_GPU;
  const auto number = [&](Attribute attribute) {
    int value = 0;
    require_ok(driver, driver.cuDeviceGetAttribute(&value, attribute, ordinal), "asking what a device has");
    return value;
  };
  require_ok(driver, driver.cuDeviceGetName(d.name, sizeof d.name, ordinal), "asking a device's name");
  d.sm_arch = number(attribute_major) * 10 + number(attribute_minor);
  d.sms = number(attribute_multiprocessors);
  d.shared_per_block = number(attribute_shared_optin);
  size_t bytes = 0;
  require_ok(driver, driver.cuDeviceTotalMem_v2(&bytes, ordinal), "asking a device's memory");
  d.memory = static_cast<int64_t>(bytes);
  core::fill_rates(d);
  return d;
}

int device_count(const Driver& driver) {
  int count = 0;
  require_ok(driver, driver.cuDeviceGetCount(&count), "counting devices");
  return count;
}

}  // namespace

const Driver& need_driver() {
  const Opened& opened = open_driver();
  if (!opened.driver)
    throw core::Error(
        TESSERA_FAILED,
        opened.why + ". Run on \"host\", or plan for a GPU that is not here by its name, such as \"h200\".");
  return *opened.driver;
}

const core::Device& device_at(const Driver& driver, Ordinal ordinal) {
  static std::array<core::Device, most_devices> all = {};
  static std::array<std::once_flag, most_devices> asked;
  if (ordinal < 0 || ordinal >= most_devices)
    throw core::Error(TESSERA_FAILED, fmt::format("device {} is past the {} that are served", ordinal, most_devices));
  const auto n = static_cast<size_t>(ordinal);
  std::call_once(asked[n], [&] { all[n] = ask(driver, ordinal); });
  return all[n];
}

OnDevice::OnDevice(const Driver& driver, const void* pointer, const char* what) : driver_(driver) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const Result asked = driver.cuPointerGetAttribute(&ordinal_, pointer_device, address);
  if (asked != invalid_value) require_ok(driver, asked, "asking which GPU holds it");
  // Below 0 are CU_DEVICE_CPU and CU_DEVICE_INVALID: memory that the driver knows and no GPU holds.
  core::require(asked == 0 && ordinal_ >= 0,
                "{} is at address {:#x}, which is no memory of a GPU. Bind device memory, or plan for \"host\".", what,
                address);
  Ordinal current = -1;
  if (driver.cuCtxGetDevice(&current) == 0 && current == ordinal_) return;
  static std::array<Context, most_devices> primary = {};
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  Context& context = primary.at(static_cast<size_t>(ordinal_));
  if (!context) require_ok(driver, driver.cuDevicePrimaryCtxRetain(&context, ordinal_), "taking a primary context");
  require_ok(driver, driver.cuCtxPushCurrent_v2(context), "making a context current");
  pushed_ = true;
}

OnDevice::~OnDevice() {
  Context context = nullptr;
  if (pushed_) driver_.cuCtxPopCurrent_v2(&context);
}

bool is_name_of_gpu(const std::string& name) {
  return name == "cuda" || name.starts_with("cuda:");
}

core::Device find_device(const std::string& name) {
  int ordinal = 0;
  if (name != "cuda") {
    const char *begin = name.data() + 5, *end = name.data() + name.size();
    const auto [stop, code] = std::from_chars(begin, end, ordinal);
    core::require(code == std::errc() && stop == end && ordinal >= 0,
                  "device is \"{}\"; a GPU of this machine is \"cuda\" or \"cuda:N\".", name);
  }
  const Driver& driver = need_driver();
  const int count = device_count(driver);
  if (ordinal >= count)
    throw core::Error(TESSERA_FAILED, fmt::format("device is \"{}\"; this machine has {} GPU{}.", name, count,
                                                  count == 1 ? ", cuda:0" : "s"));
  return device_at(driver, ordinal);
}

std::string status() {
  const Opened& opened = open_driver();
  if (!opened.driver) return "none: " + opened.why;
  try {
    const int count = device_count(*opened.driver);
    if (count == 0) return "none: the NVIDIA driver sees no GPU";
    std::string text = "ready: ";
    for (int n = 0; n < count; ++n) {
      const core::Device& d = device_at(*opened.driver, n);
      text += fmt::format("{}{} (sm_{})", n ? ", " : "", d.name, d.sm_arch);
    }
    text += ", driver CUDA " + version_text(opened.driver->version);
    const FoundPack& found = shipped_pack();
    if (found.pack) return text + fmt::format("; {} kernels in the pack", found.pack->kernels.size());
    return text + "; " + found.why;
  } catch (const core::Error& error) {
    return std::string("none: ") + error.what();
  }
}

}  // namespace tessera::cuda
