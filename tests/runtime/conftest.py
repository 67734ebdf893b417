"""Programs and stand-ins that several folders of the runtime's tests share are beside this file, which puts them on the path."""
