// Every operation that has no function of its own: checked as CUDA's wrappers check it, and
// computed by the CPU's kernel on the card's memory.
#pragma once

#include "tensors.hpp"

#include <torch/library.h>

namespace card {

// Operations that take other tensors of the CPU on a card, too.
inline const std::set<std::string> kMayMix = {
    "aten::index.Tensor",         "aten::index_put_",    "aten::_index_put_impl_",
    "aten::_unsafe_index.Tensor", "aten::index_put",     "aten::set_",
    "aten::record_stream",        "aten::_fused_adamw_", "aten::_fused_adam_",
    "aten::_foreach_copy_"};
// Operations whose result's size the host must know.
inline const std::set<std::string> kWaits = {"aten::nonzero",
                                             "aten::masked_select",
                                             "aten::_unique2",
                                             "aten::unique_dim",
                                             "aten::unique_consecutive",
                                             "aten::equal",
                                             "aten::bincount",
                                             "aten::repeat_interleave.Tensor",
                                             "aten::is_set_to"};

using Values = std::vector<c10::IValue>;

inline std::string name_of(const c10::OperatorHandle& operation) {
  const auto& name = operation.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

inline std::vector<Tensor> tensors_in(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  std::vector<Tensor> tensors;
  if (value.isList())
    for (const c10::IValue& element : value.toListRef())
      if (element.isTensor()) tensors.push_back(element.toTensor());
  return tensors;
}

inline Where device_of(const Values& values) {
  for (const c10::IValue& value : values) {
    if (value.isDevice() && value.toDevice().is_cuda()) return value.toDevice();
    for (const Tensor& tensor : tensors_in(value))
      if (tensor.defined() && tensor.is_cuda()) return tensor.device();
  }
  return std::nullopt;
}

inline bool is_cards(const c10::IValue& value) {
  return value.isGenerator() && value.toGenerator().defined() &&
         value.toGenerator().device().is_cuda();
}

// One call of an operation.
struct Call {
  const c10::OperatorHandle& operation;
  torch::jit::Stack& stack;
  const c10::FunctionSchema& schema = operation.schema();
  const std::string name = name_of(operation);
  const size_t first = stack.size() - schema.arguments().size();
  Values given = Values(stack.begin() + first, stack.end());
  Where device = device_of(given);
  Device here = device.value_or(Device(DeviceType::CUDA, current_device));
  std::vector<std::pair<Tensor, Tensor>> grown = {};  // empty outputs, which the kernel may resize

  void check_device(const Tensor& tensor, const std::string& parameter, bool writes) const {
    if (tensor.is_cuda()) {
      TORCH_CHECK(tensor.device() == here,
                  "Expected all tensors to be on the same device, but got ", parameter, " on ",
                  tensor.device(), " and ", here, " in ", name);
      return;
    }
    const bool is_scalar =
        tensor.dim() == 0 && !writes &&
        (takes_scalars.count(name) || tensor.unsafeGetTensorImpl()->is_wrapped_number());
    TORCH_CHECK(tensor.is_meta() || is_scalar || kMayMix.count(name),
                "Expected all tensors to be on the same device, but got ", parameter, " is on ",
                tensor.device(), ", different from other tensors on ", here,
                " (when checking argument in ", name, ")");
  }

  Tensor for_kernel(const Tensor& tensor, const std::string& parameter, bool writes) {
    if (!tensor.defined()) return tensor;
    check_device(tensor, parameter, writes);
    if (!tensor.is_cuda()) return tensor;
    finish_uploads_to(tensor);
    touch(tensor, writes, name);
    if (!writes || tensor.numel()) return as_cpu(tensor);
    grown.emplace_back(tensor, at::empty(tensor.sizes(), tensor.options().device(at::kCPU)));
    return grown.back().second;
  }

  c10::IValue for_kernel(const c10::IValue& value, const c10::Argument& parameter) {
    const bool writes = parameter.alias_info() && parameter.alias_info()->isWrite();
    auto convert = [&](const Tensor& tensor) {
      return for_kernel(tensor, parameter.name(), writes);
    };
    if (value.isTensor()) return convert(value.toTensor());
    if (value.isTensorList()) {
      std::vector<Tensor> tensors = value.toTensorVector();
      std::transform(tensors.begin(), tensors.end(), tensors.begin(), convert);
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        tensors.push_back(tensor ? std::optional<Tensor>(convert(*tensor)) : std::nullopt);
      return tensors;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return Device(DeviceType::CPU);
    if (is_cards(value)) return for_cpu(value.toGenerator());
    return value;
  }

  // Returns a kernel's result as the card's tensor: a view if it shares an input's memory.
  Tensor from_kernel(const Tensor& result) const {
    if (!result.defined() || !result.device().is_cpu() || !device) return result;
    if (void* base = base_of(result))
      for (const c10::IValue& value : given)
        for (const Tensor& input : tensors_in(value))
          if (input.defined() && input.is_cuda() && base_of(input) == base)
            return tensor_of(c10::Storage(input.storage()), c10::DispatchKey::CUDA, result.dtype(),
                             result.sizes(), result.strides(), result.storage_offset());
    Tensor made = make(result.sizes(), result.strides(), result.scalar_type());
    as_cpu(made).copy_(result);
    copy_wrapping(result, made);
    touch(made, true, name);
    return made;
  }

  c10::IValue from_kernel(const c10::IValue& value, const c10::Argument& result) const {
    if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(from_kernel(tensor));
      return tensors;
    }
    if (!value.isTensor()) return value;
    const auto* alias = result.alias_info();
    if (alias && alias->isWrite())  // the result is an input that was changed
      for (size_t i = 0; i < given.size(); i++) {
        const auto* input = schema.arguments()[i].alias_info();
        if (input && *input == *alias && given[i].isTensor()) return given[i];
      }
    return from_kernel(value.toTensor());
  }

  void run() {
    const auto& parameters = schema.arguments();
    for (size_t i = 0; i < parameters.size(); i++) {
      // Without a generator, the CPU's own would be drawn from.
      if (given[i].isNone() && parameters[i].type()->str() == "Generator?" &&
          name != "aten::randperm")
        given[i] = default_generator();
      stack[first + i] = for_kernel(given[i], parameters[i]);
    }
    if (kWaits.count(name)) wait_for(clocks[current_stream]);
    const Values passed(stack.begin() + first, stack.end());
    {
      at::AutoDispatchBelowADInplaceOrView below;
      operation.callBoxed(&stack);
    }
    for (size_t i = 0; i < given.size(); i++)
      if (is_cards(given[i])) {
        at::Generator generator = given[i].toGenerator();
        generator.set_state(passed[i].toGenerator().get_state());
      }
    for (const auto& [output, made] : grown) {
      if (made.sizes() == output.sizes()) continue;
      output.resize_(made.sizes());
      as_cpu(output).copy_(made);
      touch(output, true, name);
    }
    const auto& results = schema.returns();
    const size_t start = stack.size() - results.size();
    for (size_t i = 0; i < results.size(); i++)
      stack[start + i] = from_kernel(stack[start + i], results[i]);
  }
};

inline void run_on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  Locked locked(the_lock);
  begin_operation();
  Call call{operation, *stack};
  OnDevice on(call.here);
  call.run();
}

}  // namespace card
