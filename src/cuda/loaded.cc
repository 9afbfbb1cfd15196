#include "cuda/loaded.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>

#include "core/error.h"
#include "cuda/cache.h"
#include "cuda/device.h"
#include "cuda/sources.h"

namespace tessera::cuda {
namespace {

FoundPack find_pack() {
  FoundPack found;
  Dl_info here = {};
  if (!::dladdr(reinterpret_cast<void*>(&shipped_pack), &here) || !here.dli_fname) {
    found.why = "no kernel pack: the library does not know where it lies";
    return found;
  }
  const std::string library = here.dli_fname;
  const size_t slash = library.rfind('/');
  found.path = (slash == std::string::npos ? std::string(".") : library.substr(0, slash)) + "/tessera.pack";
  try {
    found.pack = read_pack(found.path);
    if (found.pack->sources != source_digest()) {
      found.why =
          fmt::format("the kernel pack {} was made of other sources than this library; build it again", found.path);
      found.pack.reset();
    }
  } catch (const core::Error& error) {
    found.why = error.what();
  }
  return found;
}

// While it lives, this thread may load code although some stream is being captured: nothing is launched by it.
class Uncaptured {
 public:
  explicit Uncaptured(const Driver& driver) : driver_(driver) { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  ~Uncaptured() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  Uncaptured(const Uncaptured&) = delete;
  Uncaptured& operator=(const Uncaptured&) = delete;

 private:
  const Driver& driver_;
  int mode_ = capture_relaxed;
};

Function load_image(const Driver& driver, const Image& image, const Code& code, Ordinal device) {
  Library library = nullptr;
  require_ok(driver, driver.cuLibraryLoadData(&library, image.bytes.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
             fmt::format("loading {} for {}", code.text, text(image.target)).c_str());
  Function function = nullptr;
  try {
    require_ok(driver, driver.cuLibraryGetKernel(&function, library, code.entry), code.entry);
    const int bytes = code.shared_bytes == any_shared ? static_cast<int>(device_at(driver, device).shared_per_block)
                                                      : code.shared_bytes;
    require_ok(driver, driver.cuKernelSetAttribute(function_max_dynamic_shared, bytes, function, device),
               fmt::format("asking for {} bytes of shared memory", bytes).c_str());
  } catch (const core::Error&) {  // it is tried again at the next run
    driver.cuLibraryUnload(library);
    throw;
  }
  return function;
}

Image compile(const Driver& driver, const Code& code, int arch, Stream stream) {
  const auto [compiler, why] = open_compiler("", driver.version);
  if (!compiler) throw core::Error(TESSERA_FAILED, why);
  const Target target = {arch, false};
  const std::string key =
      fmt::format("{} for {} of {} by {}", code.text, text(target), source_digest(), compiler->key());
  const std::string folder = cache_folder();
  if (std::optional<Image> kept = read_cached(folder, key, target)) return std::move(*kept);
  int capturing = 0;
  if (stream) driver.cuStreamIsCapturing(stream, &capturing);
  if (capturing)
    throw core::Error(TESSERA_FAILED,
                      "it is not compiled yet and the stream is being captured; run the plan once before the capture");
  Image image = compiler->compile(code, target);
  write_cached(folder, key, image);  // or not: then the next process compiles again
  return image;
}

}  // namespace

const FoundPack& shipped_pack() {
  static const FoundPack found = find_pack();
  return found;
}

const Loaded& Loaded::of(Code code) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Loaded>> all;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Loaded>& one = all[code.text];
  if (!one) one.reset(new Loaded(std::move(code)));
  return *one;
}

Function Loaded::load(Ordinal device, int arch, Stream stream) const {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  std::atomic<Function>& place = functions_[static_cast<size_t>(device)];
  if (const Function ready = place.load(std::memory_order_relaxed)) return ready;
  const Driver& driver = *open_driver().driver;
  const Uncaptured uncaptured(driver);

  std::string why = shipped_pack().why;
  if (const auto& pack = shipped_pack().pack) {
    const Image* const image = image_for(*pack, code_, arch);
    if (!image) why = fmt::format("the kernel pack has no code for sm_{}", arch);
    else if (pack->compiler / 1000 > driver.version / 1000)
      why = fmt::format("the kernel pack was made by NVRTC {}, whose code needs a driver of CUDA {}.0; this one is {}",
                        version_text(pack->compiler), pack->compiler / 1000, version_text(driver.version));
    else {
      try {
        place.store(load_image(driver, unpacked(*image), code_, device), std::memory_order_release);
        return place;
      } catch (const core::Error& error) {
        why = error.what();
      }
    }
  }
  try {
    place.store(load_image(driver, compile(driver, code_, arch, stream), code_, device), std::memory_order_release);
    return place;
  } catch (const core::Error& error) {
    throw core::Error(TESSERA_FAILED, fmt::format("{} cannot be had: {}; and here: {}", code_.text, why, error.what()));
  }
}

}  // namespace tessera::cuda
