// Device guard and hooks of a CUDA device that does not exist: autograd asks them for streams and events when it meets
// tensors on `cuda:0`. Nothing runs there; the tensors are fake.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct PretendedGuard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  Device only() const { return Device(c10::DeviceType::CUDA, 0); }
  Stream stream() const { return Stream(Stream::DEFAULT, only()); }

  Device exchangeDevice(Device) const override { return only(); }
  Device getDevice() const override { return only(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}

  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
};

PretendedGuard guard;

struct Registration {
  Registration() { c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, &guard); }
} registration;

}  // namespace

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
