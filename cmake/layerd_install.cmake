# `cmake --install`: the two programs (component runtime), and the package layerd for find_package() (component
# development). A user links layerd::client to call a daemon, or layerd::engine to compute in their own process.
include(CMakePackageConfigHelpers)

set(layerd_include_dir ${CMAKE_INSTALL_INCLUDEDIR}/layerd)
set(layerd_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/layerd)

install(TARGETS layerd layerctl RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime)

# A static library brings along all that it is built on, so the whole chain below client and engine is exported.
set(layerd_exported base kernels layers reference weights resident engine wire proto client)
list(TRANSFORM layerd_exported PREPEND layerd_)
install(TARGETS ${layerd_exported} EXPORT layerdTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development
  FILE_SET HEADERS DESTINATION ${layerd_include_dir} COMPONENT development)
install(EXPORT layerdTargets NAMESPACE layerd:: DESTINATION ${layerd_package_dir} COMPONENT development)

# The headers that protoc wrote, and the contract itself for those who generate code for other languages.
install(DIRECTORY ${LAYERD_GENERATED_DIR}/ DESTINATION ${layerd_include_dir} COMPONENT development
  FILES_MATCHING PATTERN "*.pb.h")
install(DIRECTORY ${PROJECT_SOURCE_DIR}/proto/ DESTINATION ${CMAKE_INSTALL_DATADIR}/layerd/proto COMPONENT development
  FILES_MATCHING PATTERN "*.proto")

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/layerdConfig.cmake.in layerdConfig.cmake
  INSTALL_DESTINATION ${layerd_package_dir})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(layerdConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/layerdConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/layerdConfigVersion.cmake
  DESTINATION ${layerd_package_dir} COMPONENT development)
