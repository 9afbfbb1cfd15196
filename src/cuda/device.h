// This machine's GPUs.
#pragma once
#include "core/device.h"
#include "cuda/driver.h"

namespace tessera::cuda {

const Driver& need_driver();  // throws Error(TESSERA_FAILED) with the reason

// Facts of device `ordinal`, asked of the driver once. Throws Error(TESSERA_FAILED).
const core::Device& device_at(const Driver& driver, Ordinal ordinal);

// While it lives, the device that holds `pointer` is the current one of this thread: its current context if that is of
// the device, else the device's primary context, which the CUDA runtime and the frameworks use.
class OnDevice {
 public:
  OnDevice(const Driver& driver, const void* pointer, const char* what);  // throws if it is no GPU's memory
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  Ordinal ordinal() const { return ordinal_; }

 private:
  const Driver& driver_;
  Ordinal ordinal_ = 0;
  bool pushed_ = false;
};

}  // namespace tessera::cuda
