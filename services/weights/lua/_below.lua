-- Epochs are compared as decimal strings: Lua's numbers are exact only up to 2^53.
local function below(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end
